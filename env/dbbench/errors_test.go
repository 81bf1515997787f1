package dbbench

import (
	"fmt"
	"strings"
	"testing"

	"harness-s/env"
	"harness-s/env/dbbench/embedded"
)

// One golden per number of envs.md 4.8, each the wording of MySQL 8's own
// message catalogue.
func TestErrorTranslation(t *testing.T) {
	row := embedded.Row{Tables: []embedded.Table{{Name: "t", Columns: []embedded.Column{{Name: "a"}}, Rows: [][]string{{"1"}}},
		{Name: "t2", Columns: []embedded.Column{{Name: "a"}, {Name: "b"}}, Rows: [][]string{{"1", "x"}, {"2", "y"}}}},
		Type: []string{"other"}, Label: []string{"x"}}
	e := newEnv(t, Options{Train: 1})
	a, err := e.open(t.Context(), &task{row: row}, env.OpenOptions{MaxSteps: 200})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close(t.Context())
	for _, q := range []string{"CREATE TABLE n (id INT PRIMARY KEY, v INT NOT NULL, w VARCHAR(3))", "INSERT INTO n VALUES (1,1,'a')", "CREATE INDEX k ON n (v)"} {
		if st := run(t, a, q); st.Kind != env.KindOK {
			t.Fatal(st.Obs)
		}
	}
	long := strings.Repeat("x", 70)
	near := "1064 (42000): You have an error in your SQL syntax; check the manual that corresponds to your MySQL server version for the right syntax to use near '%s' at line %d"
	for _, c := range [][2]string{
		{"INSERT INTO n VALUES (2,NULL,'a')", "1048 (23000): Column 'v' cannot be null"},
		{"USE nope", "1049 (42000): Unknown database 'nope'"},
		{"SELECT * FROM nope.t", "1049 (42000): Unknown database 'nope'"},
		{"CREATE TABLE t (a TEXT)", "1050 (42S01): Table 't' already exists"},
		{"DROP TABLE nope", "1051 (42S02): Unknown table 'dbbench.nope'"},
		{"SELECT a FROM t, t2", "1052 (23000): Column 'a' in field list is ambiguous"},
		{"SELECT 1 FROM t, t2 WHERE a=1", "1052 (23000): Column 'a' in where clause is ambiguous"},
		{"SELECT nope FROM t", "1054 (42S22): Unknown column 'nope' in 'field list'"},
		{"SELECT * FROM t WHERE nope=1", "1054 (42S22): Unknown column 'nope' in 'where clause'"},
		{"SELECT * FROM t ORDER BY nope", "1054 (42S22): Unknown column 'nope' in 'order clause'"},
		{"SELECT a FROM t GROUP BY nope", "1054 (42S22): Unknown column 'nope' in 'group statement'"},
		{"SELECT a FROM t HAVING nope=1", "1054 (42S22): Unknown column 'nope' in 'having clause'"},
		{"SELECT t.nope FROM t", "1054 (42S22): Unknown column 't.nope' in 'field list'"},
		{"SELECT * FROM t JOIN t2 ON t.a=t2.zzz", "1054 (42S22): Unknown column 't2.zzz' in 'on clause'"},
		{"UPDATE t SET nope=1", "1054 (42S22): Unknown column 'nope' in 'field list'"},
		{"INSERT INTO t (nope) VALUES (1)", "1054 (42S22): Unknown column 'nope' in 'field list'"},
		{"SELECT a, b FROM t2 GROUP BY a", "1055 (42000): Expression #2 of SELECT list is not in GROUP BY clause and contains nonaggregated column 'dbbench.t2.b' which is not " +
			"functionally dependent on columns in GROUP BY clause; this is incompatible with sql_mode=only_full_group_by"},
		{"CREATE TABLE " + long + " (a TEXT)", "1059 (42000): Identifier name '" + long + "' is too long"},
		{"CREATE TABLE x (a TEXT, a TEXT)", "1060 (42S21): Duplicate column name 'a'"},
		{"ALTER TABLE t ADD COLUMN a TEXT", "1060 (42S21): Duplicate column name 'a'"},
		{"CREATE INDEX k ON n (v)", "1061 (42000): Duplicate key name 'k'"},
		{"INSERT INTO n VALUES (1,2,'a')", "1062 (23000): Duplicate entry '1' for key 'PRIMARY'"},
		{"SELEC 1", fmt.Sprintf(near, "SELEC 1", 1)},
		{"SELECT *\nFROM t\nWHERE", fmt.Sprintf(near, "", 3)},
		{"SELECT Rank FROM t", fmt.Sprintf(near, "FROM t", 1)},
		{"SELECT order FROM t", fmt.Sprintf(near, "order FROM t", 1)},
		{"SELECT range FROM t", fmt.Sprintf(near, "range FROM t", 1)},
		{"SELECT a FROM t WHERE system = 1", fmt.Sprintf(near, "system = 1", 1)},
		{"SELECT a, FROM t", fmt.Sprintf(near, "FROM t", 1)},
		{"SELECT a, COUNT(*) FROM t2", "1140 (42000): In aggregated query without GROUP BY, expression #1 of SELECT list contains nonaggregated column " +
			"'dbbench.t2.a'; this is incompatible with sql_mode=only_full_group_by"},
		{"SELECT b, COUNT(*) FROM t2 GROUP BY a", "1055 (42000): Expression #1 of SELECT list is not in GROUP BY clause and contains nonaggregated column " +
			"'dbbench.t2.b' which is not functionally dependent on columns in GROUP BY clause; this is incompatible with sql_mode=only_full_group_by"},
		{"SELECT a, COUNT(*) FROM t2 WHERE a='1'", "[('1', 1)]"},
		{"SELECT a AS k, COUNT(*) FROM t2 GROUP BY k ORDER BY k", "[('1', 1), ('2', 1)]"},
		{"SELECT z.a FROM t", "1054 (42S22): Unknown column 'z.a' in 'field list'"},
		{"SELECT 1 2 3", fmt.Sprintf(near, "2 3", 1)},
		{"SELECT * FROM t, t", "1066 (42000): Not unique table/alias: 't'"},
		{"ALTER TABLE t DROP COLUMN nope", "1091 (42000): Can't DROP 'nope'; check that column/key exists"},
		{"INSERT INTO t2 (a,a) VALUES (1,2)", "1110 (42000): Column 'a' specified twice"},
		{"SELECT SUM(COUNT(a)) FROM t", "1111 (HY000): Invalid use of group function"},
		{"INSERT INTO t VALUES (1,2)", "1136 (21S01): Column count doesn't match value count at row 1"},
		{"INSERT INTO t2 (a,b) VALUES (1,2),(1)", "1136 (21S01): Column count doesn't match value count at row 2"},
		{"SELECT * FROM nope", "1146 (42S02): Table 'dbbench.nope' doesn't exist"},
		{"DESCRIBE nope", "1146 (42S02): Table 'dbbench.nope' doesn't exist"},
		{"SELECT 1 UNION SELECT 1,2", "1222 (21000): The used SELECT statements have a different number of columns"},
		{"SELECT (SELECT 1,2)", "1241 (21000): Operand should contain 1 column(s)"},
		{"SELECT (SELECT a FROM t2)", "1242 (21000): Subquery returns more than 1 row"},
		{"SELECT * FROM (SELECT 1)", "1248 (42000): Every derived table must have its own alias"},
		{"INSERT INTO n (id, v) VALUES (99999999999,1)", "1264 (22003): Out of range value for column 'id' at row 1"},
		{"SELECT nope(1)", "1305 (42000): FUNCTION dbbench.nope does not exist"},
		{"INSERT INTO n (id) VALUES (7)", "1364 (HY000): Field 'v' doesn't have a default value"},
		{"INSERT INTO n (id, v) VALUES (3,'abc')", "1366 (HY000): Incorrect integer value: 'abc' for column 'v' at row 1"},
		{"UPDATE n SET v='abc'", "1366 (HY000): Incorrect integer value: 'abc' for column 'v' at row 1"},
		{"INSERT INTO n VALUES (4,1,'abcdef')", "1406 (22001): Data too long for column 'w' at row 1"},
		{"SELECT LENGTH(1,2)", "1582 (42000): Incorrect parameter count in the call to native function 'LENGTH'"},
		{"SET nope=1", "1193 (HY000): Unknown system variable 'nope'"},
		{"SELECT @@nope", "1193 (HY000): Unknown system variable 'nope'"},
		{"DROP DATABASE nope", "1008 (HY000): Can't drop database 'nope'; database doesn't exist"},
	} {
		if st := run(t, a, c[0]); st.Obs != c[1] {
			t.Errorf("%s\n got %s\nwant %s", c[0], st.Obs, c[1])
		}
	}
	b := openFirst(t, e, env.OpenOptions{})
	run(t, b, "DROP DATABASE dbbench")
	if st := run(t, b, "SELECT * FROM t"); st.Obs != "1046 (3D000): No database selected" {
		t.Errorf("without a database: %s", st.Obs)
	}
	// The engine has no statement that reliably gives these; the texts are its own.
	for msg, want := range map[string]string{
		"Incorrect datetime value: 'abc'": "1292 (22007): Incorrect datetime value: 'abc'",
		"something nobody knows":          "1105 (HY000): something nobody knows",
		"100% new":                        "1105 (HY000): 100% new",
		"context canceled":                "1317 (70100): Query execution was interrupted",
	} {
		if got := errorText(e.trans.translate(sqlError(1105, "HY000", "%s", msg), "SELECT 1")); got != want {
			t.Errorf("%s: %s, want %s", msg, got, want)
		}
	}
}

func FuzzTranslate(f *testing.F) {
	f.Add("syntax error at position 17 near 'FROM'", "SELECT Rank FROM t")
	f.Add("column \"x\" could not be found in any table in scope", "SELECT x")
	tr := newTranslator("d")
	f.Fuzz(func(t *testing.T, msg, query string) {
		errorText(tr.translate(sqlError(1105, "HY000", "%s", msg), query))
	})
}

// On a real server the name of an attempt's database is drawn anew; errors that name it must read the same in every attempt.
func TestErrorsHideTheDatabaseName(t *testing.T) {
	var seen []string
	for _, id := range []string{"one", "two"} {
		name := databaseName(id)
		a := &attempt{db: &database{name: name}}
		my, err := a.failure(t.Context(), "SELECT * FROM x", sqlError(1146, "42S02", "Table '%s.x' doesn't exist", name))
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, errorText(my))
	}
	if seen[0] != seen[1] || seen[0] != "1146 (42S02): Table '"+embeddedName+".x' doesn't exist" {
		t.Errorf("observations %q", seen)
	}
}
