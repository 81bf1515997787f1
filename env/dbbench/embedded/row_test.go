package embedded

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRowReadsTolerantly(t *testing.T) {
	var r Row
	src := `{"description":"q","type":"other","label":[1,2.0,null,true],"evidence":"e","unknown":{"x":1},"sql":{"query":"SELECT 1","length":8},
	"create":{"database":"wikisql","init":"i.sql"},"table":[{"table_name":"A","table_info":{"columns":[{"name":"x","type":"INT"}],"rows":[[1],[1.0],[null],[false],["s"]]}},
	{"table_name":"B","table_info":{"columns":[],"rows":[]}}]}`
	if err := json.Unmarshal([]byte(src), &r); err != nil {
		t.Fatal(err)
	}
	want := Row{Description: "q", Evidence: "e", Type: []string{"other"}, Label: []string{"1", "2.0", "None", "True"}, SQL: "SELECT 1",
		Database: "wikisql", Init: "i.sql", Tables: []Table{
			{Name: "A", Columns: []Column{{"x", "INT"}}, Rows: [][]string{{"1"}, {"1.0"}, {"None"}, {"False"}, {"s"}}},
			{Name: "B", Columns: []Column{}, Rows: [][]string{}}}}
	if d := cmp.Diff(want, r); d != "" {
		t.Error(d)
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back Row
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	b2, _ := json.Marshal(back)
	if string(b) != string(b2) {
		t.Errorf("round trip differs:\n%s\n%s", b, b2)
	}
	for _, bad := range []string{`[]`, `{"table": 3}`, `{"table":{"table_info":{"rows":[1]}}}`} {
		if err := json.Unmarshal([]byte(bad), &r); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}

// Expected values are what CPython 3.11 prints.
func TestPyFloat(t *testing.T) {
	for f, want := range map[float64]string{0: "0.0", 1: "1.0", -2.5: "-2.5", 1e15: "1000000000000000.0", 1e16: "1e+16", 1.5e300: "1.5e+300",
		0.0001: "0.0001", 0.00001: "1e-05", 1.0 / 3: "0.3333333333333333", math.Inf(1): "inf", 123456789.125: "123456789.125"} {
		if got := PyFloat(f); got != want {
			t.Errorf("PyFloat(%g) = %s, want %s", f, got, want)
		}
	}
}
