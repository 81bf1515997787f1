package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// mention is "hs COMMAND ..." up to the end of the words that can belong to it.
var mention = regexp.MustCompile(`(?:^|[^A-Za-z0-9_.-])(?:hs|\$\(HS\)) ([a-z][a-z-]*)((?: [^\n` + "`" + `|;,()]*)?)`)

var flagWord = regexp.MustCompile(` --([a-z-]+)`)

// TestMentionedCommandsExist checks every command line in hints, help, README, Makefile and report: the command and its flags must exist.
func TestMentionedCommandsExist(t *testing.T) {
	k, err := kong.New(&cli{}, kong.Name("hs"))
	must(t, err)
	seen := 0
	check := func(where, text string) {
		for _, m := range mention.FindAllStringSubmatch(strings.ReplaceAll(text, "\\\n", " "), -1) {
			seen++
			node := child(k.Model.Node, m[1])
			if node == nil {
				t.Errorf("%s: %q: no command %s", where, strings.TrimSpace(m[0]), m[1])
				continue
			}
			rest := strings.Fields(m[2])
			if len(node.Children) > 0 && len(rest) > 0 && !strings.HasPrefix(rest[0], "-") {
				if sub := child(node, rest[0]); sub != nil {
					node = sub
				} else {
					t.Errorf("%s: %q: %s has no command %s", where, strings.TrimSpace(m[0]), m[1], rest[0])
				}
			}
			for _, f := range flagWord.FindAllStringSubmatch(m[2], -1) {
				if !hasFlag(node, f[1]) {
					t.Errorf("%s: %q: no flag --%s", where, strings.TrimSpace(m[0]), f[1])
				}
			}
		}
	}
	must(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if d != nil && d.IsDir() && (d.Name() == "build" || d.Name() == ".git" || d.Name() == "shared") {
				return filepath.SkipDir
			}
			return err
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if s, err := strconv.Unquote(lit.Value); err == nil {
					check(path, s)
				}
			}
			return true
		})
		return nil
	}))
	for _, name := range []string{"Makefile", "cmd/hs/web/report.html"} {
		b, err := os.ReadFile(filepath.Join(root, name))
		must(t, err)
		check(name, string(b))
	}
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	must(t, err)
	for _, code := range regexp.MustCompile("`[^`]+`").FindAllString(string(readme), -1) {
		check("README.md", strings.ReplaceAll(strings.Trim(code, "`"), "build/hs", "hs"))
	}
	if seen < 30 {
		t.Errorf("only %d command lines found", seen)
	}
}

func child(n *kong.Node, name string) *kong.Node {
	for _, c := range n.Children {
		if c.Name == name {
			return c
		}
	}
	return nil
}

func hasFlag(n *kong.Node, name string) bool {
	for _, group := range n.AllFlags(false) {
		for _, f := range group {
			if f.Name == name {
				return true
			}
		}
	}
	return false
}
