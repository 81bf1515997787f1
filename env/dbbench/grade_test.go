package dbbench

import (
	"encoding/json"
	"strings"
	"testing"

	"harness-s/env/dbbench/embedded"
)

// The verdicts were computed with an independent Python program that follows the
// rules of envs.md 4.4, eval included.
func TestCompareFC(t *testing.T) {
	cases := []struct {
		arg  string // the answers argument, as JSON
		gold []string
		want bool
	}{
		{`["Terns"]`, []string{"Terns"}, true},
		{`["terns"]`, []string{"Terns"}, false},
		{`[" Terns "]`, []string{"Terns"}, true},
		{`["'Terns'"]`, []string{"Terns"}, true},
		{`["\"Terns\""]`, []string{"Terns"}, true},
		{`["Terns"]`, []string{"Gull"}, false},
		{`["5"]`, []string{"5.0"}, true},
		{`["5.009"]`, []string{"5.0"}, true},
		{`["5.02"]`, []string{"5.0"}, false},
		{`["0.004"]`, []string{"0.01"}, true},
		{`["0.004"]`, []string{"0.02"}, false},
		{`["1e3"]`, []string{"1000"}, true},
		{`["1_000"]`, []string{"1000"}, true},
		{`["1__0"]`, []string{"10"}, false},
		{`["0x10"]`, []string{"16"}, false},
		{`["0x10"]`, []string{"0x10"}, true},
		{`["1,234"]`, []string{"1234"}, true},
		{`["1234"]`, []string{"1,234.00"}, true},
		{`["Paris, France"]`, []string{"Paris France"}, true},
		{`["Paris, France"]`, []string{"Paris, France"}, true},
		{`["50%"]`, []string{"50"}, true},
		{`["50 %"]`, []string{"50"}, true},
		{`["1,234%"]`, []string{"1234"}, false},
		{`["1,234%"]`, []string{"1,234"}, false},
		{`["none%"]`, []string{"none"}, false},
		{`["none%"]`, []string{"0"}, false},
		{`["None"]`, []string{"0"}, true},
		{`["null"]`, []string{"0"}, true},
		{`["NULL"]`, []string{"none"}, true},
		{`["undefined"]`, []string{"0.0"}, true},
		{`["nan"]`, []string{"0"}, true},
		{`["inf"]`, []string{"0"}, true},
		{`["-inf"]`, []string{"0"}, true},
		{`["+inf"]`, []string{"0"}, false},
		{`["+inf"]`, []string{"+inf"}, false},
		{`[""]`, []string{"0"}, true},
		{`[""]`, []string{""}, true},
		{`["''"]`, []string{"0"}, true},
		{`["None"]`, []string{"None"}, true},
		{`["Nones"]`, []string{"0"}, false},
		{`[]`, []string{"0"}, false},
		{`[]`, []string{}, true},
		{`[]`, []string{"x"}, false},
		{`["a", "b"]`, []string{"b", "a"}, true},
		{`["a", "a", "b"]`, []string{"b", "a"}, true},
		{`["a", "b"]`, []string{"a"}, false},
		{`["a"]`, []string{"a", "b"}, false},
		{`["A", "b"]`, []string{"a", "b"}, false},
		{`["1", "2"]`, []string{"2", "1"}, true},
		{`["1", "2"]`, []string{"2.005", "1"}, true},
		{`["1", "1"]`, []string{"1", "2"}, false},
		{`["1", "2", "2"]`, []string{"1", "2"}, false},
		{`["1", "x"]`, []string{"x", "1.0"}, false},
		{`["1", "x"]`, []string{"x", "1"}, true},
		{`["1.001", "1.009"]`, []string{"1.01", "1.0"}, true},
		{`["1.0", "1.01"]`, []string{"1.009", "1.001"}, true},
		{`["None", "1"]`, []string{"0", "1"}, true},
		{`["None", "x"]`, []string{"0", "x"}, true},
		{`"Terns"`, []string{"Terns"}, true},
		{`"5.0"`, []string{"5"}, true},
		{`"[('Terns',)]"`, []string{"Terns"}, true},
		{`"[(5,)]"`, []string{"5"}, true},
		{`"[(Decimal('5.50'),)]"`, []string{"5.5"}, true},
		{`"[('a',), ('b',)]"`, []string{"b", "a"}, true},
		{`"[('a', 'b')]"`, []string{"a", "b"}, false},
		{`"[('a', 'b'), ('c',)]"`, []string{"c"}, true},
		{`"[\"a\", \"b\"]"`, []string{"a", "b"}, true},
		{`"['a', 'b']"`, []string{"b", "a"}, true},
		{`"[1, 2.5]"`, []string{"2.5", "1"}, true},
		{`"[None]"`, []string{"0"}, true},
		{`"[True]"`, []string{"True"}, true},
		{`"[(None,)]"`, []string{"0"}, true},
		{`"[]"`, []string{"0"}, false},
		{`"[]"`, []string{}, true},
		{`"[a, b]"`, []string{"a", "b"}, true},
		{`"[a, 'b, c']"`, []string{"a", "b c"}, true},
		{`"['it\\'s']"`, []string{"it's"}, true},
		{`"[\"it's\"]"`, []string{"it's"}, true},
		{`"[('O\\'Hara',), ('x',)]"`, []string{"O'Hara", "x"}, true},
		{`"[('a',), 'b']"`, []string{"a", "b"}, true},
		{`"[(1, 2), 'b']"`, []string{"(1, 2)", "b"}, true},
		{`"  [1]  "`, []string{"1"}, true},
		{`"[1,2"`, []string{"[1", "2"}, false},
		{`"a, b"`, []string{"a", "b"}, false},
		{`"a, b"`, []string{"a b"}, true},
		{`"'quoted'"`, []string{"quoted"}, true},
		{`"[-5]"`, []string{"-5"}, true},
		{`"[007]"`, []string{"007"}, true},
		{`"[1_000]"`, []string{"1000"}, true},
		{`"['\\u00e9']"`, []string{"é"}, true},
		{`"[['a'], 'b']"`, []string{"['a']", "b"}, true},
		{`"['1,5']"`, []string{"15"}, true},
		{`"[\"x\" \"y\"]"`, []string{"xy"}, true},
		{`["Beyoncé"]`, []string{"Beyonce"}, false},
		{`["- 5"]`, []string{"-5"}, false},
		{`["-0"]`, []string{"0"}, true},
		{`["٣"]`, []string{"x"}, false},
		{`["1e400"]`, []string{"1e400"}, false},
		{`["[a,b]"]`, []string{"[a,b]"}, true},
		{`["$5"]`, []string{"5"}, false},
		{`["5"]`, []string{"five"}, false},
		{`["1.2.3"]`, []string{"1.2.3"}, true},
		{`["infinity"]`, []string{"0"}, true},
		{`["True"]`, []string{"1"}, false},
	}
	for _, c := range cases {
		a, err := parseAnswer(json.RawMessage(c.arg))
		if err != nil {
			t.Errorf("%s: %v", c.arg, err)
			continue
		}
		if got, _ := compare(CompareFC, a, c.gold); got != c.want {
			t.Errorf("%s against %q: %v, want %v", c.arg, c.gold, got, c.want)
		}
	}
	if len(cases) < 60 {
		t.Errorf("%d cases", len(cases))
	}
}

func TestCompareModes(t *testing.T) {
	for _, c := range []struct {
		arg             string
		gold            []string
		fc, v02, strict bool
		nullZero        bool
	}{
		{`["None"]`, []string{"0"}, true, false, false, true},
		{`["None"]`, []string{"None"}, true, true, true, false},
		{`["0.004"]`, []string{"0.01"}, true, false, false, false},
		{`["5"]`, []string{"5.0"}, true, true, true, false},
		{`["1,234"]`, []string{"1234"}, true, false, true, false},
		{`["1e2"]`, []string{"100"}, true, true, true, false},
		{`["1e999999999"]`, []string{"1e999999998"}, false, true, false, false},
		{`["0.1", "b"]`, []string{"b", "0.10"}, false, false, true, false},
		{`["a", "a"]`, []string{"a"}, true, true, true, false},
		{`["None", "x"]`, []string{"x", "0"}, true, false, false, true},
	} {
		a, err := parseAnswer(json.RawMessage(c.arg))
		if err != nil {
			t.Fatal(err)
		}
		fc, nz := compare(CompareFC, a, c.gold)
		v02, _ := compare(CompareV02, a, c.gold)
		strict, _ := compare(CompareStrict, a, c.gold)
		if fc != c.fc || v02 != c.v02 || strict != c.strict || nz != c.nullZero {
			t.Errorf("%s against %q: fc %v v02 %v strict %v null->0 %v", c.arg, c.gold, fc, v02, strict, nz)
		}
	}
}

func TestParseAnswer(t *testing.T) {
	for arg, want := range map[string]string{
		`["a",1,2.0,null,true]`: "a|1|2.0|None|True", `"x"`: "x", `5`: "5", `null`: "None", `[]`: "", `"[null, true]"`: "None|True", `"[\"a\\/b\"]"`: `a\/b`,
	} {
		a, err := parseAnswer(json.RawMessage(arg))
		if err != nil || strings.Join(a.list(), "|") != want {
			t.Errorf("%s: %q, %v, want %s", arg, a.list(), err, want)
		}
	}
	for _, bad := range []string{"", "  ", "[", `"`, "{"} {
		if _, err := parseAnswer(json.RawMessage(bad)); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
}

// Expected values are CPython 3.11's.
func TestPyFloatParse(t *testing.T) {
	for s, ok := range map[string]bool{"1": true, " 1 ": true, "1_0": true, "1__0": false, "_1": false, "1_": false, "1e5": true, "1e": false, "0x1": false, ".5": true,
		"5.": true, ".": false, "": false, "+": false, "--1": false, "+1": true, "nan": true, "-Infinity": true, "infinit": false, "1e400": true, "1,2": false,
		"1e1_0": true, "1e+5": true, "1+5": false, "1d": false, "1f": false, "1p3": false} {
		if _, got := pyFloat(s); got != ok {
			t.Errorf("float(%q) accepted %v, want %v", s, got, ok)
		}
	}
}

func TestLiteralIsSafe(t *testing.T) {
	for _, s := range []string{"__import__('os').system('x')", "1+1", "[x for x in y]", "lambda: 0", "f'x'", "{1: 2}", "[1", "('a'", "Decimal(5)", "Decimal('x')",
		"'a\nb", "'" + strings.Repeat("\\", 3), strings.Repeat("[", 100000), `'\xzz'`, `'\U99999999'`, "--", "[,]", "[1 2]", "1 2"} {
		if v, err := parseLiteral(s); err == nil {
			t.Errorf("%.40q read as %v", s, v)
		}
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add("[('a',), (Decimal('1.5'),)]", "x")
	f.Add("['a', \"b\", None, -1.5e3]", "0")
	f.Fuzz(func(t *testing.T, text, gold string) {
		for _, mode := range []string{CompareFC, CompareV02, CompareStrict} {
			compare(mode, answer{text: text, isText: true}, []string{gold})
			if ok, _ := compare(mode, answer{items: []string{text}}, []string{text}); !ok && strings.Trim(text, " ") == text {
				if _, num := pyFloat(clean(text, true)); !num {
					t.Fatalf("%s: %q is not equal to itself", mode, text)
				}
			}
		}
	})
}

// Digests by hand: md5("a,b") begins b345e, md5("b345e") is the table's.
func TestDigests(t *testing.T) {
	table := func(rows ...[]string) embedded.Table {
		return embedded.Table{Name: "T x", Columns: []embedded.Column{{Name: "c 1"}, {Name: "c`2"}}, Rows: rows}
	}
	e := newEnv(t, Options{Train: 1})
	for _, c := range []struct {
		rows [][]string
		post string
		want string
	}{
		{[][]string{{"a", "b"}}, "", "939a3f333a9beec208557baafd2b8978"},
		{[][]string{{"a", "b"}, {"", "c"}}, "", "0250a06d80feebafd09e9a86b3161053"},
		{[][]string{{"", "c"}, {"a", "b"}}, "", "0250a06d80feebafd09e9a86b3161053"}, // row order does not matter
		{[][]string{{"x", "y"}, {"a", "b"}, {"x", "y"}}, "", "304fde5e2637f4fc64fc2667f3946a89"},
		{[][]string{{"\u00e9", "1,5"}}, "", "222edf2e9695caae61f1a7a3ae55c375"},
		{[][]string{{"a", "b"}}, "UPDATE `T x` SET `c``2`=NULL", "a1e55f519c0b108c7b7b7880ccfea965"}, // NULL is skipped
		{[][]string{{"a", "b"}}, "ALTER TABLE `T x` ADD COLUMN extra TEXT", "939a3f333a9beec208557baafd2b8978"},
		{[][]string{{"a", "b"}}, "DELETE FROM `T x`", "None"},
	} {
		row := embedded.Row{Tables: []embedded.Table{table(c.rows...)}}
		q := c.post
		if q == "" {
			q = "SELECT 1"
		}
		got, err := e.digestAfter(t.Context(), &row, q, "digest")
		if err != nil || got != c.want {
			t.Errorf("%q %s: %s, %v, want %s", c.rows, c.post, got, err, c.want)
		}
	}
	two := table([]string{"a", "b"})
	two.Name = "second"
	row := embedded.Row{Tables: []embedded.Table{table([]string{"a", "b"}, []string{"", "c"}), two}}
	got, err := e.digestAfter(t.Context(), &row, "SELECT 1", "digest")
	if want := "0250a06d80feebafd09e9a86b3161053_939a3f333a9beec208557baafd2b8978"; err != nil || got != want {
		t.Errorf("two tables: %s, %v, want %s", got, err, want)
	}
	for text, want := range map[string]string{"[('abc',)]": "abc", "abc": "abc", "[(None,)]": "0"} {
		if got := goldDigest(text); got != want {
			t.Errorf("goldDigest(%s) = %s, want %s", text, got, want)
		}
	}
}
