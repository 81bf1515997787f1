package dbbench

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/dolthub/vitess/go/vt/sqlparser"

	"harness-s/env/dbbench/embedded"
)

// maxParsed is the longest statement that is parsed for facts; longer ones get
// token-based facts alone.
const maxParsed = 1 << 16

// ledger keeps what facts need from earlier steps. Everything in it follows from
// statements and their observations.
type ledger struct {
	step      int
	first     map[string]int  // statement hash -> step of its first use
	changed   map[string]bool // hashes of modifications that succeeded
	schema    map[string]bool // tables whose columns were shown
	sample    map[string]bool // tables of which rows were shown
	dml       bool
	postDML   bool
	lastVals  []string
	committed bool
}

func newLedger() *ledger {
	return &ledger{first: map[string]int{}, changed: map[string]bool{}, schema: map[string]bool{}, sample: map[string]bool{}}
}

// shown is what a statement led to.
type shown struct {
	res       *execResult // nil when nothing ran
	errno     int
	truncated bool
	timeout   bool
}

// observe returns the facts of one execute_sql (envs.md 4.6) and updates the ledger.
func (l *ledger) observe(query string, s shown) map[string]any {
	l.step++
	toks := embedded.Scan(query)
	f := tokenFacts(toks)
	var tables []string
	if len(query) <= maxParsed && len(toks) <= maxTokens {
		if stmt, err := sqlparser.Parse(query); err == nil {
			p := parseFacts(stmt)
			p.fill(f)
			tables = p.tables
		}
	}
	if tables == nil {
		tables = tokenTables(toks)
	}
	f["tables"] = tables
	kind := f["stmt_kind"].(string)
	hash := statementHash(toks)
	f["sql_hash"] = hash
	if at, ok := l.first[hash]; ok {
		f["repeat_of"] = at
	} else {
		l.first[hash] = l.step
	}
	f["dml_repeat"] = l.changed[hash]
	if s.errno != 0 {
		f["errno"] = s.errno
	}
	f["timeout"] = s.timeout
	f["truncated"] = s.truncated
	ok := s.res != nil && s.errno == 0 && !s.timeout
	if ok {
		l.follow(kind, hash, tables, f, s.res)
	}
	f["schema_seen"], f["sample_seen"] = len(l.schema) > 0, len(l.sample) > 0
	f["schema_seen_tables"], f["sample_seen_tables"] = keys(l.schema), keys(l.sample)
	f["dml_done"], f["post_dml_select"] = l.dml, l.postDML
	f["last_select_values"] = slices.Clone(l.lastVals)
	f["committed"] = l.committed
	return f
}

// follow records the consequences of a statement that ran.
func (l *ledger) follow(kind, hash string, tables []string, f map[string]any, r *execResult) {
	switch {
	case modifies(kind):
		f["affected_rows"] = int(r.affected)
		l.dml, l.postDML = true, false
		l.changed[hash] = r.affected > 0
	case r.hasRows:
		f["rows_returned"] = r.rows
		f["empty_result"] = r.rows == 0
		f["null_result"] = r.null
	}
	switch kind {
	case "show":
		for _, t := range tables {
			l.schema[strings.ToLower(t)] = true
		}
	case "select":
		l.lastVals = nil
		for _, v := range r.cells {
			if s := str(v); !slices.Contains(l.lastVals, s) {
				l.lastVals = append(l.lastVals, s)
			}
		}
		l.postDML = l.dml
		if r.rows > 0 {
			agg, _ := f["aggregates"].([]string)
			for _, t := range tables {
				if strings.EqualFold(t, "columns") {
					l.schema["columns"] = true
				} else if len(agg) == 0 {
					l.sample[strings.ToLower(t)] = true
				}
			}
			sampleFacts(f, r.cells)
		}
	}
}

func modifies(kind string) bool {
	return kind == "insert" || kind == "update" || kind == "delete" || kind == "replace"
}

// sampleFacts describes the look of returned cells: units, placeholders, totals.
func sampleFacts(f map[string]any, cells []value) {
	var units, holes, totals, commas bool
	for _, c := range cells {
		s, ok := c.(string)
		if !ok {
			continue
		}
		s = strings.TrimSpace(s)
		low := strings.ToLower(s)
		switch low {
		case "-", "", "n/a", "none", "null", "?", "--":
			holes = true
		case "total", "totals", "overall", "sum", "average", "all":
			totals = true
		}
		if s == "" || !strings.ContainsAny(s, "0123456789") {
			continue
		}
		digits := strings.Trim(s, "$%+-. ")
		trimmed := strings.TrimRight(low, "abcdefghijklmnopqrstuvwxyz%.*$ ")
		if numeric(strings.ReplaceAll(digits, ",", "")) && strings.ContainsAny(s, "$%") || trimmed != low && numeric(strings.ReplaceAll(strings.TrimSpace(trimmed), ",", "")) {
			units = true
		}
		if strings.Contains(s, ",") && numeric(strings.ReplaceAll(digits, ",", "")) {
			commas = true
		}
	}
	f["sample_units"], f["sample_placeholders"], f["sample_totals"], f["sample_thousands"] = units, holes, totals, commas
}

func numeric(s string) bool {
	_, ok := pyFloat(s)
	return ok
}

func keys(m map[string]bool) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// stmtKind names the statement: select, insert, update, delete, replace, show,
// ddl, set or other.
func stmtKind(toks []embedded.Token) string {
	for i, t := range toks {
		if t.Kind == embedded.Punct && t.Text == "(" {
			continue
		}
		if t.Kind != embedded.Word {
			return "other"
		}
		switch w := strings.ToLower(t.Text); w {
		case "select", "insert", "update", "delete", "replace", "set":
			return w
		case "with":
			depth := 0
			for _, u := range toks[i+1:] {
				switch {
				case u.Text == "(" && u.Kind == embedded.Punct:
					depth++
				case u.Text == ")" && u.Kind == embedded.Punct:
					depth--
				case depth == 0 && (u.Is("SELECT") || u.Is("UPDATE") || u.Is("DELETE")):
					return strings.ToLower(u.Text)
				}
			}
			return "select"
		case "show", "describe", "desc", "explain":
			return "show"
		case "create", "drop", "alter", "truncate", "rename":
			return "ddl"
		}
		return "other"
	}
	return "other"
}

// statementHash identifies a statement up to case of words, white space,
// comments and a final semicolon.
func statementHash(toks []embedded.Token) string {
	h := sha256.New()
	for i, t := range toks {
		if t.Text == ";" && i == len(toks)-1 {
			break
		}
		text := t.Text
		if t.Kind == embedded.Word {
			text = strings.ToLower(text)
		}
		h.Write([]byte{byte(t.Kind), 0})
		h.Write([]byte(text))
		h.Write([]byte{0})
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// mysqlReserved are words reserved in MySQL 8 that tables like to use as names.
var reservedNames = [...]string{"rank", "system", "groups", "row", "rows", "order", "group", "desc", "condition", "of", "lead", "lag", "function",
	"window", "over", "usage", "release", "character", "option", "range", "match", "force", "grouping", "empty"}

// tokenFacts are the facts that need no parse; the parsed ones replace them.
func tokenFacts(toks []embedded.Token) map[string]any {
	f := map[string]any{"stmt_kind": stmtKind(toks), "where_columns": []string{}, "aggregates": []string{}, "where_conjuncts": 0,
		"ordered_text_col_uncast": false, "uncast_numeric_compare": false, "uncast_aggregate": false, "where_equality": false, "limit_one": false}
	var and, or, parens, where, order, limit bool
	reserved := []string{}
	for i, t := range toks {
		switch {
		case t.Is("WHERE"):
			where = true
			f["where_conjuncts"] = 1
		case t.Is("LIMIT"):
			limit = true
		case t.Is("ORDER") && i+1 < len(toks) && toks[i+1].Is("BY"):
			order = true
		case where && t.Is("AND"):
			and = true
			f["where_conjuncts"] = f["where_conjuncts"].(int) + 1
		case where && t.Is("OR"):
			or = true
		case where && t.Kind == embedded.Punct && t.Text == "(":
			parens = true
		}
		if t.Kind == embedded.Word && slices.Contains(reservedNames[:], strings.ToLower(t.Text)) && !usedAsKeyword(toks, i) {
			reserved = append(reserved, t.Text)
		}
	}
	f["has_limit"], f["has_order"], f["and_or_mixed"] = limit, order, and && or && !parens
	f["reserved_unquoted"] = reserved
	return f
}

// usedAsKeyword tells whether a reserved word stands where the grammar wants it.
func usedAsKeyword(toks []embedded.Token, i int) bool {
	next := func(w string) bool { return i+1 < len(toks) && toks[i+1].Is(w) }
	punct := func(s string) bool { return i+1 < len(toks) && toks[i+1].Kind == embedded.Punct && toks[i+1].Text == s }
	switch strings.ToLower(toks[i].Text) {
	case "order", "group":
		return next("BY")
	case "desc":
		return i == 0 || i+1 == len(toks) || punct(",") || punct(";") || punct(")") || next("LIMIT")
	case "rank", "lead", "lag", "over", "match", "grouping", "row":
		return punct("(")
	case "function":
		return i > 0 && (toks[i-1].Is("CREATE") || toks[i-1].Is("DROP"))
	case "rows", "range":
		return next("BETWEEN") || next("UNBOUNDED") || next("CURRENT")
	case "character":
		return next("SET")
	case "window", "of", "force", "option", "release", "usage", "condition", "groups", "system", "empty":
		return false
	}
	return false
}

// tokenTables guesses the tables of a statement that does not parse.
func tokenTables(toks []embedded.Token) []string {
	out := []string{}
	for i, t := range toks {
		if (t.Is("FROM") || t.Is("JOIN") || t.Is("INTO") || t.Is("UPDATE") || t.Is("DESCRIBE") || t.Is("DESC") && i == 0 || t.Is("TABLE")) && i+1 < len(toks) {
			if n := toks[i+1]; (n.Kind == embedded.Word || n.Kind == embedded.Quoted) && !slices.Contains(out, n.Text) {
				out = append(out, n.Text)
			}
		}
	}
	return out
}

// parsed collects facts from a syntax tree.
type parsed struct {
	tables, where, aggs                   []string
	conjuncts                             int
	limit, order, limitOne                bool
	orderText, compare, aggText, equality bool
}

func parseFacts(stmt sqlparser.Statement) *parsed {
	p := &parsed{tables: []string{}, where: []string{}, aggs: []string{}}
	ctes := map[string]bool{}
	walk := func(n sqlparser.SQLNode) (bool, error) {
		switch x := n.(type) {
		case *sqlparser.CommonTableExpr:
			if x.AliasedTableExpr != nil {
				ctes[strings.ToLower(x.AliasedTableExpr.As.String())] = true
			}
		case *sqlparser.AliasedTableExpr:
			if t, ok := x.Expr.(sqlparser.TableName); ok {
				add(&p.tables, t.Name.String())
			}
		case *sqlparser.Select:
			p.clauses(x.Where, x.OrderBy, x.Limit)
		case *sqlparser.SetOp:
			p.clauses(nil, x.OrderBy, x.Limit)
		case *sqlparser.Update:
			p.clauses(x.Where, x.OrderBy, x.Limit)
		case *sqlparser.Delete:
			p.clauses(x.Where, x.OrderBy, x.Limit)
		case *sqlparser.Insert:
			add(&p.tables, x.Table.Name.String())
		case *sqlparser.Show:
			add(&p.tables, x.Table.Name.String())
		case *sqlparser.DDL:
			add(&p.tables, x.Table.Name.String())
		case *sqlparser.FuncExpr:
			p.function(x)
		case *sqlparser.GroupConcatExpr:
			add(&p.aggs, "GROUP_CONCAT")
		case *sqlparser.ComparisonExpr:
			p.comparison(x)
		}
		return true, nil
	}
	sqlparser.Walk(walk, stmt)
	p.tables = slices.DeleteFunc(p.tables, func(t string) bool { return t == "" || ctes[strings.ToLower(t)] })
	return p
}

func add(list *[]string, s string) {
	if s != "" && !slices.Contains(*list, s) {
		*list = append(*list, s)
	}
}

func (p *parsed) clauses(where *sqlparser.Where, order sqlparser.OrderBy, limit *sqlparser.Limit) {
	if where != nil {
		p.conjuncts = max(p.conjuncts, countAnds(where.Expr))
		sqlparser.Walk(func(n sqlparser.SQLNode) (bool, error) {
			if c, ok := n.(*sqlparser.ColName); ok {
				add(&p.where, c.Name.String())
			}
			if c, ok := n.(*sqlparser.ComparisonExpr); ok && c.Operator == sqlparser.EqualStr {
				p.equality = true
			}
			return true, nil
		}, where.Expr)
	}
	for _, o := range order {
		p.order = true
		if _, bare := o.Expr.(*sqlparser.ColName); bare {
			p.orderText = true
		}
	}
	if limit != nil {
		p.limit = true
		if v, ok := limit.Rowcount.(*sqlparser.SQLVal); ok && string(v.Val) == "1" && len(order) > 0 {
			p.limitOne = true
		}
	}
}

func countAnds(e sqlparser.Expr) int {
	switch x := e.(type) {
	case *sqlparser.AndExpr:
		return countAnds(x.Left) + countAnds(x.Right)
	case *sqlparser.ParenExpr:
		return countAnds(x.Expr)
	}
	return 1
}

func (p *parsed) function(x *sqlparser.FuncExpr) {
	name := strings.ToUpper(x.Name.String())
	switch name {
	case "COUNT", "SUM", "AVG", "MIN", "MAX":
	default:
		return
	}
	add(&p.aggs, name)
	if name == "COUNT" || len(x.Exprs) == 0 {
		return
	}
	if a, ok := x.Exprs[0].(*sqlparser.AliasedExpr); ok {
		if _, bare := a.Expr.(*sqlparser.ColName); bare {
			p.aggText = true
		}
	}
}

// comparison notes a bare column compared with a number, or with text that is a
// number by anything but equality: every column is TEXT.
func (p *parsed) comparison(x *sqlparser.ComparisonExpr) {
	for _, side := range [2][2]sqlparser.Expr{{x.Left, x.Right}, {x.Right, x.Left}} {
		_, bare := side[0].(*sqlparser.ColName)
		v, lit := side[1].(*sqlparser.SQLVal)
		if !bare || !lit {
			continue
		}
		ordering := strings.ContainsAny(x.Operator, "<>") && x.Operator != sqlparser.NullSafeEqualStr
		if v.Type == sqlparser.IntVal || v.Type == sqlparser.FloatVal || ordering && numeric(string(v.Val)) {
			p.compare = true
		}
	}
}

func (p *parsed) fill(f map[string]any) {
	f["where_columns"], f["aggregates"] = p.where, p.aggs
	f["where_conjuncts"] = p.conjuncts
	f["has_limit"], f["has_order"] = p.limit, p.order
	f["ordered_text_col_uncast"], f["uncast_numeric_compare"], f["uncast_aggregate"] = p.orderText, p.compare, p.aggText
	f["where_equality"], f["limit_one"] = p.equality, p.limitOne
}
