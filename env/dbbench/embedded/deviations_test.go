package embedded

import (
	"database/sql"
	"fmt"
	"strings"
	"testing"
)

// deviations are the known differences from MySQL 8 (envs.md 4.8): each row
// states what MySQL gives and what this engine gives. When an engine upgrade
// fixes one, its row fails here and goes.
//
// Fixture: s(Score TEXT) = '10', '9.5', '1,234', '-3', '12abc', ”; n(i INT) = 1, 2;
// p(name TEXT) = 'Alice'.
func TestDeviations(t *testing.T) {
	for _, d := range []struct{ id, query, mysql, engine string }{
		{"G1", "SELECT '12abc'=12", "1", "0"},
		{"G1", "SELECT '12abc'>9", "1", "0"},
		{"G1", "SELECT COUNT(*) FROM s WHERE Score IN (9.5)", "1", "0"},
		{"G2", "SELECT SUM(Score) FROM s", "29.5", "16.5"},
		{"G2", "SELECT AVG(Score) FROM s", "4.916666666666667", "2.75"},
		{"G2", "SELECT SUM(Score > 5) FROM s", "3", "2"},
		{"G3", "SELECT CAST('12abc' AS SIGNED)", "12", "0"},
		{"G3", "SELECT CAST('12.7' AS SIGNED)", "12", "13"},
		{"G3", "SELECT CAST('1,234' AS DECIMAL(10,2))", "1.00", "0.00"},
		{"G3", "SELECT CAST('50%' AS SIGNED)", "50", "0"},
		{"G4", "SELECT ROUND('2.5')", "2", "3"},
		{"G4", "SELECT ROUND(2.5E0)", "2", "3"},
		{"G4", "SELECT FLOOR('3.7abc')", "3", "0"},
		{"G4", "SELECT ABS('-3')", "3", "NULL"},
		{"G8", "SELECT Score, COUNT(*) FROM s", "error 1140", "row"},
		{"G9", "CREATE TABLE g9 (`` TEXT)", "error 1166", "row"},
		{"G10", "SELECT COUNT(*) FROM S", "error 1146", "6"},
		{"G12", "INSERT INTO n VALUES (1/0)", "error 1365", "row"},
		{"G13", "SELECT 1 AS né", "1", "error"},
		{"G14", "SELECT 1 = ANY (SELECT 1)", "1", "error"},
		{"G14", "SELECT i, COUNT(*) FROM n GROUP BY i WITH ROLLUP", "row", "error"},
		{"G14", "CREATE TEMPORARY TABLE g14 (a INT)", "row", "error"},
		{"G14", "SELECT TRUNCATE(1.29, 1)", "1.2", "error"},
		{"G14", "SELECT INTERVAL(2, 1, 3)", "1", "error"},
		{"G14", "SELECT N'x'", "x", "error"},
		{"G16", "SELECT VERSION()", "the server's", "8.0.31"},
		{"T5", "SELECT COUNT(DISTINCT a) FROM (SELECT 'a' AS a UNION ALL SELECT 'A') x", "1", "2"},
	} {
		_, c := open(t)
		for _, q := range []string{"CREATE TABLE s (Score TEXT)", "INSERT INTO s VALUES ('10'),('9.5'),('1,234'),('-3'),('12abc'),('')",
			"CREATE TABLE n (i INT)", "INSERT INTO n VALUES (1),(2)"} {
			if _, err := c.ExecContext(t.Context(), q); err != nil {
				t.Fatal(err)
			}
		}
		if got := probe(t, c, d.query); got != d.engine {
			t.Errorf("%s %s: engine gives %s; this table says %s (MySQL %s)", d.id, d.query, got, d.engine, d.mysql)
		}
	}
}

// probe is the first cell of the only column, "row" for anything else that
// works, and "error" otherwise.
func probe(t *testing.T, c *sql.Conn, q string) string {
	t.Helper()
	rows, err := c.QueryContext(t.Context(), q)
	if err != nil {
		return "error"
	}
	defer rows.Close()
	cols, err := rows.Columns()
	if err != nil {
		return "error"
	}
	out := "row"
	for rows.Next() {
		if len(cols) != 1 {
			continue
		}
		var v any
		if err := rows.Scan(&v); err != nil {
			return "error"
		}
		switch x := v.(type) {
		case nil:
			out = "NULL"
		case []byte:
			out = string(x)
		default:
			out = fmt.Sprint(x)
		}
	}
	if rows.Err() != nil {
		return "error"
	}
	return out
}

// Deviations of statements that change rows.
func TestDeviationsOfChanges(t *testing.T) {
	_, c := open(t)
	exec := func(q string) int64 {
		t.Helper()
		r, err := c.ExecContext(t.Context(), q)
		if err != nil {
			t.Fatalf("%s: %v", q, err)
		}
		n, _ := r.RowsAffected()
		return n
	}
	exec("CREATE TABLE p (name TEXT, v TEXT)")
	exec("INSERT INTO p VALUES ('Alice','1'),('Bob','2'),('Cid','x')")
	// G6: MySQL changes one row, this engine compares rows without case.
	if n := exec("UPDATE p SET name='ALICE' WHERE name='Alice'"); n != 0 || scalar(t, c, "SELECT name FROM p WHERE v='1'") != "Alice" {
		t.Errorf("G6: %d rows changed; MySQL changes 1", n)
	}
	// G7: MySQL gives error 1292 in strict mode.
	if n := exec("UPDATE p SET v='9' WHERE v=2"); n != 1 {
		t.Errorf("G7: %d rows changed", n)
	}
	// G11: MySQL keeps insertion order, here the updated row moves to the end.
	rows, err := c.QueryContext(t.Context(), "SELECT name FROM p")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var names []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		names = append(names, s)
	}
	if got := strings.Join(names, ","); got != "Alice,Cid,Bob" {
		t.Errorf("G11: order %s; MySQL gives Alice,Bob,Cid, this table says Alice,Cid,Bob", got)
	}
	// G15: MySQL shows plain text; the observation layer cuts the collation off.
	rows2, err := c.QueryContext(t.Context(), "DESCRIBE p")
	if err != nil {
		t.Fatal(err)
	}
	defer rows2.Close()
	for rows2.Next() {
		var f, typ, null, key string
		var def, extra sql.NullString
		if err := rows2.Scan(&f, &typ, &null, &key, &def, &extra); err != nil {
			t.Fatal(err)
		}
		if typ != "text COLLATE utf8mb4_0900_ai_ci" {
			t.Errorf("G15: type %q; MySQL gives text", typ)
		}
	}
}

// What the engine gets right, and tasks rely on.
func TestAgreesWithMySQL(t *testing.T) {
	_, c := open(t)
	for _, q := range []string{"CREATE TABLE s (name TEXT, Score TEXT)", "INSERT INTO s VALUES ('Ann','10'),('ann','9'),('Bob','1,234')"} {
		if _, err := c.ExecContext(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	for q, want := range map[string]string{
		"SELECT Rank FROM s":                                     "error",
		"SELECT 'a' = 'a '":                                      "0",
		"SELECT 'é' = 'E'":                                       "1",
		"SELECT COUNT(*) FROM s WHERE name LIKE 'ANN'":           "2",
		"SELECT COUNT(*) FROM (SELECT 1 FROM s GROUP BY name) x": "2",
		"SELECT 1 || 0":                                          "1",
		"SELECT \"x\"":                                           "x",
		"SELECT 'a\\tb'":                                         "a\tb",
		"SELECT 1/4":                                             "0.2500",
		"SELECT '12abc'+0":                                       "12",
		"SELECT '1,234'+0":                                       "1",
		"SELECT MAX(Score) FROM s":                               "9",
		"SELECT REPLACE('1,234', ',', '')+0":                     "1234",
		"SELECT CAST(REPLACE('1,234', ',', '') AS SIGNED)":       "1234",
		"SELECT CAST(REPLACE('1,234', ',', '') AS DECIMAL)":      "1234",
		"SELECT GROUP_CONCAT(name ORDER BY name DESC, Score SEPARATOR '-') FROM s": "Bob-Ann-ann",
		"SELECT ROW_NUMBER() OVER (ORDER BY Score) AS k FROM s ORDER BY k LIMIT 1": "1",
		"WITH x AS (SELECT Score FROM s) SELECT COUNT(*) FROM x":                   "3",
		"SELECT COUNT(*) FROM s WHERE Score = (SELECT MAX(Score) FROM s)":          "1",
		"SELECT COUNT(*) FROM s a JOIN s b ON a.name = b.name":                     "5",
		"SELECT COUNT(*) FROM information_schema.columns WHERE table_name='s'":     "2",
		"SELECT COUNT(*) FROM s LIMIT 0, 1":                                        "3",
	} {
		if got := probe(t, c, q); got != want {
			t.Errorf("%s: %s, want %s", q, got, want)
		}
	}
}
