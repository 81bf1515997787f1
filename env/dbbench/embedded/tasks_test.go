package embedded

import (
	"crypto/md5"
	"encoding/hex"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestGenerateIsPureAndSplitsAreDisjoint(t *testing.T) {
	seen := map[string]string{}
	content := map[string]string{}
	families := map[string]int{}
	for _, split := range []string{"train", "val", "test"} {
		for _, seed := range []uint64{1, 2} {
			for i := range 200 {
				a, err := Generate(seed, split, i)
				if err != nil {
					t.Fatal(err)
				}
				b, err := Generate(seed, split, i)
				if err != nil || !reflect.DeepEqual(a, b) {
					t.Fatalf("task %d of %s differs between two calls (%v)", i, split, err)
				}
				if a.Split != split {
					t.Fatalf("task %s is in %s, asked for %s", a.ID, a.Split, split)
				}
				if other, ok := seen[a.ID]; ok {
					t.Errorf("id %s in %s and %s", a.ID, other, split)
				}
				seen[a.ID] = split
				key := a.Row.Description + strings.Join(slices.Concat(a.Row.Tables[0].Rows...), "|")
				if other, ok := content[key]; ok {
					t.Errorf("content of %s in %s and %s", a.ID, other, split)
				}
				content[key] = split
				families[a.Family]++
			}
		}
	}
	for _, f := range Families() {
		if families[f.Name] < 40 {
			t.Errorf("family %s: %d of 1200 tasks", f.Name, families[f.Name])
		}
	}
}

func TestGenerateMix(t *testing.T) {
	for i := range 50 {
		a, err := GenerateMix(Mix{"intersect": 1}, 5, "val", i)
		if err != nil || a.Family != "intersect" || !a.Hard {
			t.Fatalf("task %d: %+v, %v", i, a, err)
		}
	}
	for name, c := range map[string]struct {
		mix   Mix
		split string
		index int
	}{
		"unknown family": {Mix{"joins": 1}, "train", 0}, "all zero": {Mix{}, "train", 0}, "negative": {Mix{"lookup": -1}, "train", 0},
		"split": {nil, "dev", 0}, "index": {nil, "train", -1},
	} {
		if _, err := GenerateMix(c.mix, 1, c.split, c.index); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestTaskShape(t *testing.T) {
	for i := range 400 {
		a, err := Generate(9, "train", i)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(strings.Fields(a.Row.Description)); n > 16 || len(a.Row.Description) > 100 {
			t.Errorf("%s: question too long: %q", a.ID, a.Row.Description)
		}
		for name, p := range map[string]Program{"good": a.Good, "sloppy": a.Sloppy, "recover": a.Recover} {
			if len(p) < 2 || len(p) > 3 || p[len(p)-1].SQL != "" || len(p[len(p)-1].Answers) == 0 {
				t.Errorf("%s: %s program %v does not end in a commit after 1 or 2 queries", a.ID, name, p)
			}
		}
		if len(a.Good) != 2 || a.Good[0].SQL == a.Sloppy[0].SQL {
			t.Errorf("%s: good %v, sloppy %v", a.ID, a.Good, a.Sloppy)
		}
		if a.Row.Modifies() != (a.Row.AnswerMD5 != nil) {
			t.Errorf("%s: type %v, answer_md5 %v", a.ID, a.Row.Type, a.Row.AnswerMD5)
		}
		if !a.Row.Modifies() && slices.Equal(a.Sloppy[len(a.Sloppy)-1].Answers, a.Row.Label) {
			t.Errorf("%s: sloppy answer is right", a.ID)
		}
		if a.Family == "paged" && visible(a.Row.Tables[0].Rows) >= len(a.Row.Tables[0].Rows) {
			t.Errorf("%s: listing fits", a.ID)
		}
	}
}

// The digest of two rows by hand: md5("a,1") = 4124..., md5("b,2") = ..., sorted
// and joined. The inner hashes are recomputed with the library, the joining is
// spelled out.
func TestTableMD5(t *testing.T) {
	h := func(s string) string { x := md5.Sum([]byte(s)); return hex.EncodeToString(x[:]) }
	parts := []string{h("a,1")[:5], h("b,2")[:5]}
	slices.Sort(parts)
	want := h(parts[0] + "," + parts[1])
	if got := TableMD5([][]string{{"b", "2"}, {"a", "1"}}); got != want {
		t.Errorf("TableMD5 = %s, want %s", got, want)
	}
	if TableMD5([][]string{{"a", "1"}}) == TableMD5([][]string{{"1", "a"}}) {
		t.Error("column order does not matter")
	}
}

func TestCallText(t *testing.T) {
	got := Call{Answers: []string{"Otter", "it's"}}.Text()
	want := "<tool_call>\n<function=commit_final_answer>\n<parameter=answers>\n[\"Otter\", \"it's\"]\n</parameter>\n</function>\n</tool_call>"
	if got != want {
		t.Errorf("got %q", got)
	}
	if got := (Call{}).Text(); !strings.Contains(got, "\n[]\n") {
		t.Errorf("empty commit: %q", got)
	}
}
