package dbbench

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestReadRowsErrors checks that a wrong row is named by line, key, what it holds and what is wanted.
func TestReadRowsErrors(t *testing.T) {
	const good = `{"description":"q","type":["other"],"label":["1"],"table":{"table_name":"t","table_info":{"columns":[{"name":"a","type":"TEXT"}],"rows":[["1"]]}}}`
	for _, c := range []struct{ name, text, want string }{
		{"syntax", good + "\n{\"description\": oops}\n", `line 2 column 17 near "oops}": invalid character 'o'`},
		{"cut line", good + "\n" + good[:40] + "\n", "line 2"},
		{"not an object", good + "\n\n5\n", "line 3: the row is a JSON number, want an object"},
		{"description", `{"description":7}`, `line 1: key "description" holds a JSON number, want a string`},
		{"table", `{"table":"t"}`, `line 1: key "table" holds a JSON string, want an object`},
		{"columns", `{"table":{"table_info":{"columns":{}}}}`, `key "table.table_info.columns" holds a JSON object, want a list`},
		{"create", `{"create":[]}`, `key "create" holds a JSON array, want an object`},
		{"empty", "\n", "no rows"},
		{"many", strings.Repeat("x\n", maxRowErrors+5), "and 5 more"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "rows.jsonl")
			if err := os.WriteFile(path, []byte(c.text), 0o644); err != nil {
				t.Fatal(err)
			}
			if _, err := ReadRows(path); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v, want %q and the path", err, c.want)
			}
		})
	}
}

// TestGoldNamesTheLine checks that a row without a needed key is listed with its line and that key.
func TestGoldNamesTheLine(t *testing.T) {
	const table = `"table":{"table_name":"t","table_info":{"columns":[{"name":"a","type":"TEXT"}],"rows":[["1"]]}}`
	path := filepath.Join(t.TempDir(), "rows.jsonl")
	text := "\n{\"description\":\"q\",\"type\":[\"other\"],\"label\":[\"1\"]," + table + "}\n" +
		"{\"type\":[\"other\"],\"label\":[\"1\"]," + table + "}\n{\"description\":\"q\",\"type\":[\"other\"]," + table + "}\n{\"description\":\"q\",\"label\":[\"1\"]," + table + "}\n" +
		"{\"description\":\"q\",\"type\":[\"other\"],\"label\":[\"1\"]}\n"
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	rows, err := ReadRows(path)
	if err != nil {
		t.Fatal(err)
	}
	rep, err := GoldReplay(t.Context(), rows, Options{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if rep.Passed != 1 || len(rep.Failed) != 4 {
		t.Fatalf("passed %d, failed %v", rep.Passed, rep.Failed)
	}
	for i, key := range []string{"description", "label", "type", "table"} {
		if f := rep.Failed[i]; f.Line != 3+i || !strings.Contains(f.Reason, `key "`+key+`"`) {
			t.Errorf("line %d: %s; want line %d and key %s", f.Line, f.Reason, 3+i, key)
		}
	}
}
