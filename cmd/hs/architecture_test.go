package main

import (
	"bytes"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// dagTable reads the fenced dag block of ARCHITECTURE.md: package -> imported packages of this module.
func dagTable(t *testing.T) map[string][]string {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join(root, "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(doc), "```dag\n")
	block, _, ok2 := strings.Cut(rest, "```")
	if !ok || !ok2 {
		t.Fatal("ARCHITECTURE.md has no ```dag block")
	}
	table := map[string][]string{}
	for line := range strings.Lines(block) {
		pkg, deps, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok {
			t.Fatalf("dag line %q has no colon", line)
		}
		table[pkg] = strings.Fields(deps)
	}
	return table
}

func TestImportDAG(t *testing.T) {
	table := dagTable(t)
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	seen := map[string]bool{}
	for dec := json.NewDecoder(bytes.NewReader(out)); dec.More(); {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(p.ImportPath, "harness-s/")
		seen[name] = true
		allowed, listed := table[name]
		if !listed {
			t.Errorf("package %s is not in the dag block of ARCHITECTURE.md", name)
			continue
		}
		var used []string
		for _, imp := range p.Imports {
			if dep, ok := strings.CutPrefix(imp, "harness-s/"); ok {
				used = append(used, dep)
				if !slices.Contains(allowed, dep) {
					t.Errorf("%s imports %s, which the dag block does not allow", name, dep)
				}
			}
		}
		for _, dep := range allowed {
			if !slices.Contains(used, dep) {
				t.Errorf("dag block lists %s -> %s, which is not used", name, dep)
			}
		}
	}
	for pkg := range table {
		if !seen[pkg] {
			t.Errorf("dag block lists %s, which does not exist", pkg)
		}
	}
}

// forbidden are imports and calls confined to the named places.
var confined = []struct {
	imp, call string // import path prefix, or pkg.Func
	where     []string
	tests     bool // tests may use it anywhere
}{
	{imp: "C", where: []string{"kernels/cgo.go"}},
	{imp: "gorgonia.org/cu", where: []string{"kernels/driver_cu.go"}},
	{imp: "gorgonia.org/gorgonia", where: []string{"model/"}},
	{imp: "gorgonia.org/tensor", where: []string{"model/"}},
	{imp: "github.com/chewxy/hm", where: []string{"model/"}},
	{imp: "net/http", where: []string{"cmd/hs/"}, tests: true},
	{call: "os.Getenv", where: []string{"cmd/hs/"}, tests: true},
	{call: "os.LookupEnv", where: []string{"cmd/hs/"}, tests: true},
	{call: "time.Now", where: []string{"trainer/", "cmd/hs/"}, tests: true},
	{call: "env.Unseal", where: []string{"trainer/eval.go"}, tests: true},
}

func TestConfinedImportsAndCalls(t *testing.T) {
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		if d.IsDir() {
			if n := d.Name(); n == "build" || n == "runs" || n == "testdata" || strings.HasPrefix(n, ".") && rel != "." {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		check(t, filepath.ToSlash(rel), f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func check(t *testing.T, rel string, f *ast.File) {
	test := strings.HasSuffix(rel, "_test.go") || strings.HasPrefix(rel, "env/envtest/") // the conformance suite runs in tests
	for _, c := range confined {
		if c.tests && test || slices.ContainsFunc(c.where, func(w string) bool { return strings.HasPrefix(rel, w) }) {
			continue
		}
		if c.imp != "" {
			for _, imp := range f.Imports {
				if p := strings.Trim(imp.Path.Value, `"`); p == c.imp || strings.HasPrefix(p, c.imp+"/") {
					t.Errorf("%s imports %s, which belongs to %v", rel, p, c.where)
				}
			}
			continue
		}
		pkg, name, _ := strings.Cut(c.call, ".")
		ast.Inspect(f, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok && s.Sel.Name == name {
				if x, ok := s.X.(*ast.Ident); ok && x.Name == pkg {
					t.Errorf("%s calls %s, which belongs to %v", rel, c.call, c.where)
				}
			}
			return true
		})
	}
}

// TestFuzzList checks that make fuzz runs every fuzz target and names none that is gone: go test passes silently over an unknown name.
func TestFuzzList(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(strings.ReplaceAll(string(text), "\\\n", ""), "\nFUZZ")
	line, _, _ := strings.Cut(rest, "\n")
	_, list, _ := strings.Cut(line, ":=")
	have := strings.Fields(list)
	var want []string
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "build" || d.Name() == ".git" || d.Name() == "shared") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		for _, decl := range f.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok && strings.HasPrefix(fn.Name.Name, "Fuzz") {
				want = append(want, "./"+filepath.ToSlash(dir)+":"+fn.Name.Name)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) {
		t.Errorf("FUZZ of the Makefile: %v\nfuzz targets: %v", have, want)
	}
}
