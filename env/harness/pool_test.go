package harness

import (
	"encoding/json"
	"flag"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

var update = flag.Bool("update", false, "rewrite golden files")

// The pool digest changes only on purpose: every recorded run depends on it.
func TestStarterPoolGolden(t *testing.T) {
	p := starterPool(t)
	var b strings.Builder
	b.WriteString(p.Digest() + "\n")
	for _, s := range p.Specs {
		b.WriteString(s.ID() + " " + s.Name + " " + strings.Join(s.Causes, ",") + "\n")
	}
	const file = "testdata/pool_dbbench.txt"
	if *update {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("pool is\n%swant\n%s(go test ./env/harness -run Golden -update)", b.String(), want)
	}
}

func TestStarterPoolShape(t *testing.T) {
	p := starterPool(t)
	if len(p.Specs) != 20 || !p.Original().Original() || len(p.Auxiliaries()) != 19 {
		t.Fatalf("%d specs", len(p.Specs))
	}
	if n := len(strings.Fields(p.Original().System())); n > 60 {
		t.Errorf("original system prompt has %d words", n)
	}
	perCause := map[string]int{}
	pairs := 0
	for _, s := range p.Auxiliaries() {
		if len(s.Edits) == 2 {
			pairs++
		}
		if s.Predicted == "" {
			t.Errorf("%s: no predicted effect", s.Name)
		}
		edits := map[string]bool{}
		for _, e := range s.Edits {
			for _, c := range e.Causes {
				edits[c] = true
			}
			for _, op := range e.Ops {
				if n := len(strings.Fields(op.Text)); n > 25 {
					t.Errorf("%s: text of %d words", s.Name, n)
				}
			}
		}
		for _, c := range s.Causes {
			perCause[c]++
			if !edits[c] {
				t.Errorf("%s: cause %s has no edit", s.Name, c)
			}
		}
		if problems := Gate(s, p.Original(), p.Specs, byteCoder{}, LintData{}); problems != nil {
			t.Errorf("%s: %v", s.Name, problems)
		}
		if got := p.Get(s.ID()); got != s || p.Get(s.Name) != s {
			t.Errorf("%s is not found by id or name", s.Name)
		}
		if len(s.Diff(p.Original())) == 0 {
			t.Errorf("%s: empty diff", s.Name)
		}
	}
	for _, c := range []string{"D-SCHEMA", "D-TYPE", "D-SET", "D-AGG", "D-DML", "D-PROTO", "D-DONE"} {
		if perCause[c] < 3 {
			t.Errorf("cause %s has %d auxiliaries", c, perCause[c])
		}
	}
	if pairs < 4 {
		t.Errorf("%d two-edit combinations", pairs)
	}
}

func TestCanonicalIsStable(t *testing.T) {
	p, q := starterPool(t), starterPool(t)
	for i := range p.Specs {
		a, b := p.Specs[i], q.Specs[i]
		if string(a.Canonical()) != string(b.Canonical()) || a.ID() != b.ID() || len(a.ID()) != 12 {
			t.Errorf("%s is not stable", a.Name)
		}
		var v map[string]any
		if err := json.Unmarshal(a.Canonical(), &v); err != nil || !strings.HasSuffix(string(a.Canonical()), "}\n") {
			t.Errorf("%s: canonical form: %v", a.Name, err)
		}
	}
}

const base = "name = \"original\"\nenv = \"e\"\nv = 1\n[[sections]]\nname = \"protocol\"\ntext = \"P\"\n"

func child(name, parent, ops string) string {
	return "name = \"" + name + "\"\nenv = \"e\"\nv = 1\nparent = \"" + parent + "\"\ncauses = [\"D-SET\"]\n[[edits]]\nid = \"x\"\n[[edits.ops]]\n" + ops
}

func TestLoadPool(t *testing.T) {
	load := func(files ...string) (*Pool, error) {
		fsys := fstest.MapFS{}
		for i, f := range files {
			fsys["pool/"+string(rune('a'+i))+".toml"] = &fstest.MapFile{Data: []byte(f)}
		}
		return LoadPool(fsys, "pool")
	}
	system := func(text string) string {
		return "slot = \"system\"\nsection = \"data\"\nop = \"append\"\ntext = \"" + text + "\"\n"
	}
	p, err := load(base, child("one", "original", system("A")), child("two", "one", system("B")))
	if err != nil {
		t.Fatal(err)
	}
	if got := p.Specs[2].System(); got != "P\nA\nB" {
		t.Errorf("a grandchild's prompt is %q", got)
	}
	for name, c := range map[string]struct {
		files []string
		want  string
	}{
		"empty":           {nil, "no *.toml"},
		"unknown key":     {[]string{base, child("one", "original", system("A")+"colour = 1\n")}, "unknown keys"},
		"locked protocol": {[]string{base, child("one", "original", strings.ReplaceAll(system("A"), "data", "protocol"))}, "locked"},
		"unknown parent":  {[]string{base, child("one", "nobody", system("A"))}, "not in the pool before it"},
		"duplicate":       {[]string{base, child("one", "original", system("A")), child("two", "original", system("A"))}, "behave the same"},
		"same name":       {[]string{base, child("one", "original", system("A")), child("one", "original", system("B"))}, "twice"},
		"other env":       {[]string{base, strings.ReplaceAll(child("one", "original", system("A")), "env = \"e\"", "env = \"f\"")}, "the original is for"},
		"two originals":   {[]string{base, base}, "sections and tools come from the original"},
		"slot":            {[]string{base, child("one", "original", "slot = \"verifier\"\ntext = \"x\"\n")}, "unknown slot"},
		"op":              {[]string{base, child("one", "original", "slot = \"tool_doc\"\ntool = \"x\"\nop = \"replace\"\ntext = \"x\"\n")}, "want one of"},
		"hole":            {[]string{base, child("one", "original", "slot = \"reminder\"\ntext = \"a {b\"\n")}, "braces"},
		"predicate":       {[]string{base, child("one", "original", "slot = \"reminder\"\ntext = \"a\"\nwhen = {f = \"x\", op = \"is\", v = 1}\n")}, "operator"},
		"guard":           {[]string{base, child("one", "original", "slot = \"guard\"\non = \"dml\"\naction = \"block_max\"\nblock_max = 9\ntext = \"x\"\n")}, "block_max 9"},
		"long text":       {[]string{base, child("one", "original", system(strings.Repeat("x", 401)))}, "401 characters"},
		"chat marker":     {[]string{base, child("one", "original", system("<|im_end|>"))}, "chat markers"},
		"limits":          {[]string{base, child("one", "original", "slot = \"limits\"\nreminder_tokens = 500\n")}, "may only lower"},
		"cause":           {[]string{base, strings.ReplaceAll(child("one", "original", system("A")), "D-SET", "sets")}, "not a code"},
		"memory":          {[]string{base, child("one", "original", "slot = \"memory\"\nmech = \"vector\"\n")}, "mech"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := load(c.files...); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
		})
	}
	if _, err := StarterPool("nowhere"); err == nil {
		t.Error("unknown environment has a pool")
	}
}

func TestLint(t *testing.T) {
	s := func(text string) *Spec {
		return specWith(t, "[[edits.ops]]\nslot = \"reminder\"\ntext = \""+text+"\"\n")
	}
	question := "Which of the eight grey ferries left harbour last on Tuesday morning?"
	d := LintData{Forbidden: []string{"Otterbach", "task_17"}, Grams: map[uint64]struct{}{}}
	for _, g := range HashGrams(question) {
		d.Grams[g] = struct{}{}
	}
	for text, want := range map[string]bool{
		"Look twice.":                                         false,
		"The answer is otterbach.":                            true,
		"Otterbachs are fine.":                                false,
		"See task_17 again.":                                  true,
		"Note the ID 50e1ac9_1 here.":                         true,
		"intersect-0123456789 is the one":                     true,
		"password: hunter2":                                   true,
		"Open /home/agent/notes first.":                       true,
		"the eight grey ferries left harbour last on tuesday": true,
		"the eight grey ferries left harbour last":            false,
	} {
		if got := len(Lint(s(text), d)) > 0; got != want {
			t.Errorf("%q: finding %v, want %v", text, got, want)
		}
	}
	over := s("x")
	over.sections = append(slices.Clone(over.sections), Section{"data", strings.Repeat("y", 500)})
	if p := Gate(over, starterPool(t).Original(), nil, byteCoder{}, LintData{}); len(p) != 1 || p[0].Check != "budget" {
		t.Errorf("gate: %v", p)
	}
	if p := Gate(s("x"), starterPool(t).Original(), []*Spec{s("x")}, byteCoder{}, LintData{}); len(p) != 1 || p[0].Check != "duplicate" {
		t.Errorf("gate: %v", p)
	}
}
