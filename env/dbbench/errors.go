package dbbench

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/go-sql-driver/mysql"

	"harness-s/env/dbbench/embedded"
)

// errorText is how the observation shows a server error.
func errorText(e *mysql.MySQLError) string {
	state := "HY000"
	if e.SQLState != [5]byte{} {
		state = string(e.SQLState[:])
	}
	return fmt.Sprintf("%d (%s): %s", e.Number, state, e.Message)
}

func sqlError(number uint16, state, format string, args ...any) *mysql.MySQLError {
	e := &mysql.MySQLError{Number: number, Message: fmt.Sprintf(format, args...)}
	copy(e.SQLState[:], state)
	return e
}

// syntaxError is MySQL's 1064 with the text that begins at the offending token.
func syntaxError(query string, at int) *mysql.MySQLError {
	line := 1 + strings.Count(query[:at], "\n")
	near := query[at:]
	for i := range near {
		if i >= 80 {
			near = near[:i]
			break
		}
	}
	return sqlError(1064, "42000", "You have an error in your SQL syntax; check the manual that corresponds to your MySQL server version "+
		"for the right syntax to use near '%s' at line %d", near, line)
}

// translator turns the embedded engine's errors into MySQL's: number, SQLSTATE
// and wording. Facts and harness edits key on the number.
type translator struct {
	db    string
	rules []rule
}

type rule struct {
	re    *regexp.Regexp
	build func(db, query string, m []string) *mysql.MySQLError
}

// newTranslator compiles the table; db is the database that unqualified names
// belong to.
func newTranslator(db string) *translator {
	fixed := func(number uint16, state, format string) func(_, _ string, m []string) *mysql.MySQLError {
		return func(_, _ string, m []string) *mysql.MySQLError {
			args := make([]any, 0, len(m)-1)
			for _, s := range m[1:] {
				args = append(args, s)
			}
			return sqlError(number, state, format, args...)
		}
	}
	column := func(number uint16, format string) func(_, query string, m []string) *mysql.MySQLError {
		return func(_, query string, m []string) *mysql.MySQLError {
			name := m[len(m)-1]
			shown := strings.Join(m[1:], ".")
			state := "42S22"
			if number == 1052 {
				state = "23000"
			}
			return sqlError(number, state, format, shown, clauseOf(query, name))
		}
	}
	unknown := column(1054, "Unknown column '%s' in '%s'")
	t := &translator{db: db}
	add := func(pattern string, build func(db, query string, m []string) *mysql.MySQLError) {
		t.rules = append(t.rules, rule{regexp.MustCompile(`(?s)` + pattern), build})
	}
	add(`^no database selected`, fixed(1046, "3D000", "No database selected"))
	add(`^column name '(.*?)' is non-nullable but attempted`, fixed(1048, "23000", "Column '%s' cannot be null"))
	add(`^can't create database (.*?); database exists`, fixed(1007, "HY000", "Can't create database '%s'; database exists"))
	add(`^database not found: (.*)$`, func(_, query string, m []string) *mysql.MySQLError {
		if statement(query) == "DROP" {
			return sqlError(1008, "HY000", "Can't drop database '%s'; database doesn't exist", m[1])
		}
		return sqlError(1049, "42000", "Unknown database '%s'", m[1])
	})
	add(`^table with name (.*?) already exists`, fixed(1050, "42S01", "Table '%s' already exists"))
	add(`^(?:ambiguous column name|ambiguous column or alias name|Column) "(.*?)"(?:, it's present| in order clause is amb|$)`,
		column(1052, "Column '%s' in %s is ambiguous"))
	add(`^column "(.*?)" could not be found in any table in scope`, func(db, query string, m []string) *mysql.MySQLError {
		if statement(query) == "SET" {
			return sqlError(1193, "HY000", "Unknown system variable '%s'", m[1])
		}
		if nestedAggregate(query, m[1]) {
			return sqlError(1111, "HY000", "Invalid use of group function")
		}
		if i := strings.LastIndexByte(m[1], '.'); i >= 0 {
			m = []string{m[0], m[1][:i], m[1][i+1:]}
		}
		return unknown(db, query, m)
	})
	add(`^column "(.*?)" does not exist in scope, but there is an alias`, unknown)
	add(`^table "(.*?)" does not have column "(.*?)"`, func(db, query string, m []string) *mysql.MySQLError {
		if s := statement(query); s == "ALTER" && dropsColumn(query, m[2]) {
			return sqlError(1091, "42000", "Can't DROP '%s'; check that column/key exists", m[2])
		} else if s == "ALTER" {
			return sqlError(1054, "42S22", "Unknown column '%s' in '%s'", m[2], m[1])
		}
		return unknown(db, query, m)
	})
	add(`^Unknown column '(.*?)' in '`, unknown)
	add(`^unknown column: '(.*?)' in index`, fixed(1072, "42000", "Key column '%s' doesn't exist in table"))
	add(`can't drop '(.*?)'; check that column/key exists`, fixed(1091, "42000", "Can't DROP '%s'; check that column/key exists"))
	add(`^expression '(.*?)' doesn't appear in the group by expressions`, func(db, query string, m []string) *mysql.MySQLError {
		name := strings.ReplaceAll(m[1], "`", "")
		if strings.Count(name, ".") == 1 {
			name = db + "." + name
		}
		return notGrouped(selectIndex(query, name), spelled(query, name))
	})
	add(`^invalid identifier: .(.*?).$`, fixed(1059, "42000", "Identifier name '%s' is too long"))
	add(`^duplicate column name: .(.*?).$`, fixed(1060, "42S21", "Duplicate column name '%s'"))
	add(`^Column "(.*?)" already exists`, fixed(1060, "42S21", "Duplicate column name '%s'"))
	add(`^Duplicate key name '(.*?)'`, fixed(1061, "42000", "Duplicate key name '%s'"))
	add(`^duplicate (?:primary|unique) key given: \[(.*?)\]`, func(_, _ string, m []string) *mysql.MySQLError {
		return sqlError(1062, "23000", "Duplicate entry '%s' for key 'PRIMARY'", strings.ReplaceAll(m[1], " ", "-"))
	})
	add(`^Duplicate entry for key '(.*?)'`, fixed(1062, "23000", "Duplicate entry for key '%s'"))
	add(`^Every derived table must have its own alias`, fixed(1248, "42000", "Every derived table must have its own alias"))
	add(`syntax error at position (\d+)(?: near '(.*)')?`, func(_, query string, m []string) *mysql.MySQLError {
		pos, _ := strconv.Atoi(m[1])
		return syntaxError(query, syntaxStart(query, pos, m[2]))
	})
	add(`^Not unique table/alias: (.*)$`, fixed(1066, "42000", "Not unique table/alias: '%s'"))
	add(`^column '(.*?)' specified twice`, fixed(1110, "42000", "Column '%s' specified twice"))
	add(`(?i)(?:invalid use of group function|aggregations? (?:is|are) not|aggregate function.*not (?:allowed|supported)|an aggregation remained)`,
		fixed(1111, "HY000", "Invalid use of group function"))
	add(`^number of values does not match number of columns`, func(_, query string, _ []string) *mysql.MySQLError {
		return sqlError(1136, "21S01", "Column count doesn't match value count at row %d", badRow(query))
	})
	add(`^(Column count doesn't match value count at row \d+)`, fixed(1136, "21S01", "%s"))
	add(`^table not found: ([^,]*)`, func(db, query string, m []string) *mysql.MySQLError {
		name := strings.TrimSpace(m[1])
		if statement(query) == "DROP" {
			return sqlError(1051, "42S02", "Unknown table '%s.%s'", db, name)
		}
		if col, ok := onlyQualifies(query, name); ok {
			return unknown(db, query, []string{"", name, col})
		}
		return sqlError(1146, "42S02", "Table '%s.%s' doesn't exist", db, name)
	})
	add(`^Unknown table '(.*?)'`, func(db, _ string, m []string) *mysql.MySQLError {
		return sqlError(1051, "42S02", "Unknown table '%s.%s'", db, m[1])
	})
	add(`^cannot union two queries whose schemas are different lengths|^The used SELECT statements have a different number`,
		fixed(1222, "21000", "The used SELECT statements have a different number of columns"))
	add(`^operand should have (\d+) columns?, but has`, fixed(1241, "21000", "Operand should contain %s column(s)"))
	add(`^the subquery returned more than 1 row`, fixed(1242, "21000", "Subquery returns more than 1 row"))
	add(`^(?:value )?(\S+) (?:is )?out of range for`, func(_, query string, m []string) *mysql.MySQLError {
		return sqlError(1264, "22003", "Out of range value for column '%s' at row 1", columnFor(query, m[1]))
	})
	add(`(?i)(?:incorrect|invalid) (date|datetime|time|double|integer|decimal)(?: value)?:? '?([^']*)'?`, func(_, _ string, m []string) *mysql.MySQLError {
		return sqlError(1292, "22007", "Incorrect %s value: '%s'", strings.ToLower(m[1]), m[2])
	})
	add(`^function: '(.*?)' not found`, func(db, _ string, m []string) *mysql.MySQLError {
		return sqlError(1305, "42000", "FUNCTION %s.%s does not exist", db, m[1])
	})
	add(`^stored procedure "(.*?)" does not exist`, func(db, _ string, m []string) *mysql.MySQLError {
		return sqlError(1305, "42000", "PROCEDURE %s.%s does not exist", db, m[1])
	})
	add(`^Field '(.*?)' doesn't have a default value`, fixed(1364, "HY000", "Field '%s' doesn't have a default value"))
	add(`^error: '(.*?)' is not a valid value for '(.*?)'`, func(_, query string, m []string) *mysql.MySQLError {
		kind := map[string]string{"int": "integer", "bigint": "integer", "smallint": "integer", "tinyint": "integer"}[m[2]]
		if kind == "" {
			kind, _, _ = strings.Cut(m[2], "(")
		}
		return sqlError(1366, "HY000", "Incorrect %s value: '%s' for column '%s' at row 1", kind, m[1], columnFor(query, m[1]))
	})
	add(`^string '.*' is too large for column '(.*?)'`, fixed(1406, "22001", "Data too long for column '%s' at row 1"))
	add(`^function '(.*?)' (?:expected .* arguments|received invalid argument types)`, func(_, _ string, m []string) *mysql.MySQLError {
		return sqlError(1582, "42000", "Incorrect parameter count in the call to native function '%s'", strings.ToUpper(m[1]))
	})
	add(`^Unknown system variable '@*(.*?)'`, fixed(1193, "HY000", "Unknown system variable '%s'"))
	add(`^Unknown collation: (.*)$`, fixed(1273, "HY000", "Unknown collation: '%s'"))
	add(`^the given regular expression is invalid`, fixed(3685, "HY000", "Illegal argument to a regular expression."))
	add(`^Unknown prepared statement handler \((.*?)\)`, fixed(1243, "HY000", "Unknown prepared statement handler (%s) given to EXECUTE"))
	add(`--secure-file-priv option`, fixed(1290, "HY000", "The MySQL server is running with the --secure-file-priv option so it cannot execute this statement"))
	add(`^context canceled`, fixed(1317, "70100", "Query execution was interrupted"))
	return t
}

// translate maps an engine error; texts that no rule knows keep their number.
func (t *translator) translate(e *mysql.MySQLError, query string) *mysql.MySQLError {
	msg := strings.TrimPrefix(e.Message, "unknown error: ")
	for _, r := range t.rules {
		if m := r.re.FindStringSubmatch(msg); m != nil {
			return r.build(t.db, query, m)
		}
	}
	return e
}

// statement is the first word of query in upper case.
func statement(query string) string {
	for _, t := range embedded.Scan(query) {
		if t.Kind == embedded.Word {
			return strings.ToUpper(t.Text)
		}
		if t.Text != "(" {
			break
		}
	}
	return ""
}

func named(t embedded.Token, name string) bool {
	return (t.Kind == embedded.Word || t.Kind == embedded.Quoted) && strings.EqualFold(t.Text, name)
}

// clauseOf names, as MySQL does, the clause of query in which a column is first used.
func clauseOf(query, name string) string {
	clause := "field list"
	for _, t := range embedded.Scan(query) {
		if named(t, name) {
			return clause
		}
		switch {
		case t.Is("WHERE"):
			clause = "where clause"
		case t.Is("GROUP"):
			clause = "group statement"
		case t.Is("HAVING"):
			clause = "having clause"
		case t.Is("ORDER"):
			clause = "order clause"
		case t.Is("ON"):
			clause = "on clause"
		case t.Is("SELECT"), t.Is("SET"):
			clause = "field list"
		}
	}
	return "field list"
}

// onlyQualifies reports that name stands in query only before a dot, never as a
// table of its own, and gives the column it first qualifies.
func onlyQualifies(query, name string) (column string, ok bool) {
	toks := embedded.Scan(query)
	for i, t := range toks {
		if !named(t, name) {
			continue
		}
		if i+2 >= len(toks) || toks[i+1].Text != "." {
			return "", false
		}
		if !ok {
			column, ok = toks[i+2].Text, true
		}
	}
	return column, ok
}

// spelled gives the parts of a dotted name the case they have in query; the
// engine lower-cases tables.
func spelled(query, name string) string {
	parts := strings.Split(name, ".")
	toks := embedded.Scan(query)
	for i, p := range parts {
		for _, t := range toks {
			if named(t, p) {
				parts[i] = t.Text
				break
			}
		}
	}
	return strings.Join(parts, ".")
}

// selectIndex is the 1-based position in the select list at which a column is used.
func selectIndex(query, name string) int {
	name = name[strings.LastIndexByte(name, '.')+1:]
	n, depth, in := 1, 0, false
	for _, t := range embedded.Scan(query) {
		switch {
		case t.Is("SELECT"):
			n, in = 1, true
		case t.Is("FROM") && depth == 0:
			return 1
		case t.Text == "(" && t.Kind == embedded.Punct:
			depth++
		case t.Text == ")" && t.Kind == embedded.Punct:
			depth--
		case t.Text == "," && t.Kind == embedded.Punct && depth == 0 && in:
			n++
		case in && named(t, name):
			return n
		}
	}
	return 1
}

// nestedAggregate reports whether name is the argument of an aggregate inside an aggregate.
func nestedAggregate(query, name string) bool {
	aggregates := map[string]bool{"SUM": true, "COUNT": true, "AVG": true, "MIN": true, "MAX": true}
	toks := embedded.Scan(query)
	depth := 0
	for i, t := range toks {
		switch {
		case i+1 < len(toks) && toks[i+1].Text == "(" && aggregates[strings.ToUpper(t.Text)]:
			depth++
		case t.Text == ")":
			depth = 0
		case named(t, name) && depth > 1:
			return true
		}
	}
	return false
}

func dropsColumn(query, name string) bool {
	drop := false
	for _, t := range embedded.Scan(query) {
		if t.Is("DROP") {
			drop = true
		} else if drop && named(t, name) {
			return true
		} else if !t.Is("COLUMN") && t.Text != "." {
			drop = drop && t.Kind != embedded.Punct
		}
	}
	return false
}

// badRow is the first row of a VALUES list whose width differs from the column
// list, or from the first row when there is none.
func badRow(query string) int {
	want, depth, width, row := 0, 0, 1, 0
	values := false
	for _, t := range embedded.Scan(query) {
		switch {
		case t.Is("VALUES") || t.Is("VALUE"):
			values = true
		case t.Kind != embedded.Punct:
		case t.Text == "(":
			if depth++; depth == 1 {
				width = 1
			}
		case t.Text == "," && depth == 1:
			width++
		case t.Text == ")":
			if depth--; depth != 0 {
				continue
			}
			if !values {
				want = width
				continue
			}
			if row++; want == 0 {
				want = width
			} else if width != want {
				return row
			}
		}
	}
	return 1
}

// columnFor is the column that receives a value: by position in an INSERT with
// a column list, by assignment in an UPDATE; "" when it cannot be told.
func columnFor(query, val string) string {
	toks := embedded.Scan(query)
	var cols []string
	depth, n := 0, 0
	values := false
	for i, t := range toks {
		switch {
		case t.Is("VALUES") || t.Is("VALUE"):
			values = true
		case t.Kind == embedded.Punct && t.Text == "(":
			depth++
			n = 0
		case t.Kind == embedded.Punct && t.Text == ")":
			depth--
		case t.Kind == embedded.Punct && t.Text == ",":
			n++
		case !values && depth == 1 && (t.Kind == embedded.Word || t.Kind == embedded.Quoted):
			cols = append(cols, t.Text)
		case t.Text == val && values && n < len(cols):
			return cols[n]
		case t.Text == val && i >= 2 && toks[i-1].Text == "=":
			return toks[i-2].Text
		}
	}
	return ""
}

// syntaxStart is where the token begins that the engine's parser stopped at;
// pos is its 1-based end. A statement that merely ends too early gives its end.
func syntaxStart(query string, pos int, near string) int {
	end := min(max(pos-1, 0), len(query))
	if near == "" {
		return end
	}
	at := strings.LastIndex(query[:end], near)
	if at < 0 {
		return end
	}
	if strings.TrimRight(query[at+len(near):], "; \t\r\n") == "" && continues(near) {
		return len(strings.TrimRight(query, "; \t\r\n"))
	}
	if at > 0 && strings.IndexByte("'\"`", query[at-1]) >= 0 {
		at--
	}
	return reservedBefore(query, at)
}

// reservedBefore moves back to a reserved word used as a name right before at:
// the engine's parser stops one token late there. Words that can begin an
// expression (RANK, ROW, ...) stop MySQL late as well.
func reservedBefore(query string, at int) int {
	toks := embedded.Scan(query)
	for i, t := range toks {
		if t.Pos != at || i == 0 {
			continue
		}
		prev := toks[i-1]
		if i >= 2 && toks[i-2].Kind == embedded.Punct && strings.Contains(",=", toks[i-2].Text) && prev.Kind == embedded.Word && continues(prev.Text) {
			return prev.Pos // a clause began where a value had to come
		}
		switch word := strings.ToLower(prev.Text); word {
		case "rank", "lead", "lag", "row", "match", "grouping":
		default:
			if prev.Kind == embedded.Word && slices.Contains(reservedNames[:], word) && !usedAsKeyword(toks, i-1) {
				return prev.Pos
			}
		}
	}
	return at
}

// continues reports whether a statement cannot end with this word.
func continues(word string) bool {
	switch strings.ToUpper(word) {
	case "SELECT", "FROM", "WHERE", "AND", "OR", "NOT", "BY", "ORDER", "GROUP", "HAVING", "LIMIT", "SET", "INTO", "VALUES", "JOIN", "ON", "LIKE",
		"IN", "BETWEEN", "AS", "UPDATE", "DELETE", "INSERT", ",", "=", "(", "<", ">", "+", "-", "*":
		return true
	}
	return false
}
