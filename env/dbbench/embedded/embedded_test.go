package embedded

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"
)

// open starts an engine with database d holding table t(a TEXT).
func open(t *testing.T) (*Server, *sql.Conn) {
	t.Helper()
	s, err := Start(Options{})
	if err != nil {
		t.Fatal(err)
	}
	db, err := s.DB("")
	if err != nil {
		t.Fatal(err)
	}
	c, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		db.Close()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, q := range []string{"CREATE DATABASE d CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_ai_ci", "USE d", "CREATE TABLE t (a TEXT)"} {
		if _, err := c.ExecContext(t.Context(), q); err != nil {
			t.Fatal(q, err)
		}
	}
	return s, c
}

func scalar(t *testing.T, c *sql.Conn, q string) string {
	t.Helper()
	var v sql.NullString
	if err := c.QueryRowContext(t.Context(), q).Scan(&v); err != nil {
		return "error: " + err.Error()
	}
	if !v.Valid {
		return "NULL"
	}
	return v.String
}

func TestSessionSettings(t *testing.T) {
	_, c := open(t)
	for q, want := range map[string]string{
		"SELECT 'a'='A'":                  "1",
		"SELECT @@sql_mode":               "ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION,NO_ZERO_DATE,NO_ZERO_IN_DATE,ONLY_FULL_GROUP_BY,STRICT_TRANS_TABLES", // SQLMode, sorted
		"SELECT @@group_concat_max_len":   "1024",
		"SELECT @@collation_connection":   "utf8mb4_0900_ai_ci",
		"SELECT @@local_infile":           "0",
		"SELECT REPEAT('ab', 3)":          "ababab",
		"SELECT LENGTH(SPACE(4))":         "4",
		"SELECT LPAD('x', 3, 'ab')":       "abx",
		"SELECT REPEAT('ab', 2000000000)": "NULL",
		"SELECT SPACE(2000000000)":        "NULL",
		"SELECT RPAD('a',2000000000,'b')": "NULL",
		"SELECT REPEAT('ab', -1)":         "",
		"SELECT REPEAT(NULL, 3)":          "NULL",
	} {
		if got := scalar(t, c, q); got != want {
			t.Errorf("%s = %q, want %q", q, got, want)
		}
	}
}

// Every way to reach a host file must be refused, and must stay refused.
func TestHostFiles(t *testing.T) {
	_, c := open(t)
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out")
	for _, try := range []string{"SET SESSION secure_file_priv=''", "SET secure_file_priv='" + dir + "'", "SET @@session.secure_file_priv='" + dir + "'"} {
		if _, err := c.ExecContext(t.Context(), try); err == nil {
			t.Errorf("%s was accepted", try)
		}
	}
	if got := scalar(t, c, "SELECT LOAD_FILE('"+secret+"')"); strings.Contains(got, "secret\n") || got != "NULL" && !strings.HasPrefix(got, "error") {
		t.Errorf("LOAD_FILE gave %q", got)
	}
	for _, q := range []string{
		"LOAD DATA INFILE '" + secret + "' INTO TABLE t",
		"LOAD DATA LOCAL INFILE '" + secret + "' INTO TABLE t",
		"SELECT 'x' INTO OUTFILE '" + out + "'",
		"SELECT 'x' INTO DUMPFILE '" + out + "'",
	} {
		if _, err := c.ExecContext(t.Context(), q); err == nil {
			t.Errorf("%s was accepted", q)
		}
	}
	if _, err := os.Stat(out); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a statement wrote %s", out)
	}
	if got := scalar(t, c, "SELECT COUNT(*) FROM t"); got != "0" {
		t.Errorf("rows loaded from a host file: %s", got)
	}
}

func TestRefuse(t *testing.T) {
	for q, refuse := range map[string]bool{
		"SET GLOBAL max_connections=1":                 true,
		"set  /* x */ global max_connections=1":        true,
		"SET SESSION sql_mode='', GLOBAL sql_mode=''":  true,
		"SET @@global.sql_mode=''":                     true,
		"SET @@`GLOBAL`.sql_mode=''":                   true,
		"SET @@ global.sql_mode=''":                    true,
		"SET PERSIST max_connections=1":                true,
		"SET PERSIST_ONLY max_connections=1":           true,
		"SET @@persist.max_connections=1":              true,
		"/*!50000 SET GLOBAL sql_mode='' */":           true,
		"PREPARE s FROM 'SET GLOBAL sql_mode=1'":       true,
		"PREPARE s FROM @x":                            true,
		"CREATE PROCEDURE p() SET GLOBAL sql_mode=''":  true,
		"SET sql_mode=''":                              false,
		"SET SESSION sql_mode=''":                      false,
		"SELECT @@global.sql_mode":                     false,
		"UPDATE t SET global = 1, persist = 2":         false,
		"UPDATE t SET a='SET GLOBAL x=1'":              false,
		"INSERT INTO t VALUES ('set global sql_mode')": false,
		"PREPARE s FROM 'SELECT 1'":                    false,
		"-- SET GLOBAL x=1\nSELECT 1":                  false,
	} {
		err := Refuse(q)
		if (err != nil) != refuse {
			t.Errorf("Refuse(%q) = %v, want refused %v", q, err, refuse)
		}
		var me *mysql.MySQLError
		if err != nil && (!errors.As(err, &me) || me.Number != 1227) {
			t.Errorf("Refuse(%q) = %v, want errno 1227", q, err)
		}
	}
}

func TestKillQueryEndsRunawayJoin(t *testing.T) {
	s, c := open(t)
	for range 7 {
		if _, err := c.ExecContext(t.Context(), "INSERT INTO t VALUES "+strings.Repeat("('x'),", 60)+"('y')"); err != nil {
			t.Fatal(err)
		}
	}
	id := scalar(t, c, "SELECT CONNECTION_ID()")
	done := make(chan error, 1)
	go func() {
		var n int
		done <- c.QueryRowContext(context.Background(), "SELECT COUNT(*) FROM t a, t b, t c, t d WHERE a.a<>b.a OR c.a=d.a").Scan(&n)
	}()
	db, err := s.DB("")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for { // until the join is listed as running, the kill would hit nothing
		var n int
		if err := db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM information_schema.processlist WHERE command='Query' AND id="+id).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n > 0 {
			break
		}
	}
	if _, err := db.ExecContext(t.Context(), "KILL QUERY "+id); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil {
		t.Error("the join finished")
	}
	if got := scalar(t, c, "SELECT 1"); got != "1" {
		t.Errorf("connection after the kill: %s", got)
	}
}

func TestEnginesAreIsolated(t *testing.T) {
	_, a := open(t)
	_, b := open(t)
	if _, err := a.ExecContext(t.Context(), "INSERT INTO t VALUES ('marker')"); err != nil {
		t.Fatal(err)
	}
	if got := scalar(t, b, "SELECT COUNT(*) FROM d.t"); got != "0" {
		t.Errorf("other engine sees %s rows", got)
	}
}

func TestCloseEndsEverything(t *testing.T) {
	s, err := Start(Options{Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if c, err := net.Dial("tcp", s.Addr()); err != nil {
		t.Error(err)
	} else {
		defer c.Close()
	}
	db, err := s.DB("")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.PingContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Fatal(err)
	}
	if err := db.PingContext(t.Context()); err == nil {
		t.Error("closed engine answers")
	}
}

func TestScan(t *testing.T) {
	var got []string
	for _, tok := range Scan("SELECT `a b`, 'it''s' -- x\n, \"q\\\"\" /* y */ FROM t # z\nWHERE x>=1.5e3 AND @v=1;") {
		got = append(got, fmt.Sprintf("%d:%s", tok.Kind, tok.Text))
	}
	want := "0:SELECT 1:a b 5:, 2:it's 5:, 2:q\" 0:FROM 0:t 0:WHERE 0:x 5:> 5:= 3:1.5e3 0:AND 4:@v 5:= 3:1 5:;"
	if strings.Join(got, " ") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, " "), want)
	}
	for _, q := range []string{"'", "`", "\"\\", "/*", "/*!", "@", "@@", "--", "\xff\xfe", "/*!50000 */ */"} {
		Scan(q)
	}
}

func FuzzScan(f *testing.F) {
	f.Add("SELECT 1; -- x")
	f.Fuzz(func(t *testing.T, q string) {
		last := -1
		for _, tok := range Scan(q) {
			if tok.Pos <= last || tok.Pos >= len(q) {
				t.Fatalf("position %d after %d in %q", tok.Pos, last, q)
			}
			last = tok.Pos
		}
		Refuse(q)
	})
}
