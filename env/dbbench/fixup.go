package dbbench

import (
	"strconv"
	"strings"

	"github.com/dolthub/vitess/go/vt/sqlparser"
	"github.com/go-sql-driver/mysql"
)

// fixer re-types result cells of the embedded engine where it is known to differ
// from MySQL: SUM and AVG over exact numbers are DECIMAL there, % of integers is
// an integer, and DESCRIBE shows no collation.
type fixer struct {
	cols     []sqlType
	describe bool
}

// sqlType is what MySQL's static typing says about an expression.
type sqlType struct {
	kind  uint8 // 0 unknown
	scale int
}

const (
	typeUnknown uint8 = iota
	typeInt
	typeDecimal
	typeDouble
)

func (t sqlType) exact() bool { return t.kind == typeInt || t.kind == typeDecimal }

func newFixer(query string, numCols int) fixer {
	switch statement(query) {
	case "DESCRIBE", "DESC", "SHOW", "EXPLAIN":
		return fixer{describe: true}
	case "SELECT", "WITH":
	default:
		return fixer{}
	}
	if len(query) > 1<<16 {
		return fixer{}
	}
	stmt, err := sqlparser.Parse(query)
	if err != nil {
		return fixer{}
	}
	sel, ok := stmt.(*sqlparser.Select)
	if !ok || len(sel.SelectExprs) != numCols {
		return fixer{}
	}
	sc := scopeOf(sel)
	f := fixer{cols: make([]sqlType, numCols)}
	for i, e := range sel.SelectExprs {
		a, ok := e.(*sqlparser.AliasedExpr)
		if !ok {
			return fixer{}
		}
		f.cols[i] = sc.typeOf(a.Expr)
	}
	return f
}

func (f fixer) apply(i int, col string, v value) value {
	if s, ok := v.(string); ok && f.describe && strings.EqualFold(col, "Type") {
		if at := strings.Index(s, " COLLATE "); at >= 0 {
			return s[:at]
		}
		return v
	}
	if i >= len(f.cols) {
		return v
	}
	t := f.cols[i]
	switch x := v.(type) {
	case float64:
		switch {
		case t.kind == typeDecimal:
			return decimal(strconv.FormatFloat(x, 'f', t.scale, 64))
		case t.kind == typeInt && x == float64(int64(x)):
			return int64(x)
		}
	case decimal:
		if t.kind == typeInt {
			if n, err := strconv.ParseInt(string(x), 10, 64); err == nil {
				return n
			}
		}
	case string:
		if t.kind == typeDecimal || t.kind == typeDouble {
			if n, err := strconv.ParseFloat(x, 64); err == nil {
				if t.kind == typeDecimal {
					return decimal(strconv.FormatFloat(n, 'f', t.scale, 64))
				}
				return n
			}
		}
	}
	return v
}

// scope types the columns of derived tables by lower-case name; base columns are
// TEXT and absent.
type scope map[string]sqlType

// scopeOf reads the derived tables in the FROM list and the common table
// expressions of a SELECT. A name that two of them use stays unknown.
func scopeOf(sel *sqlparser.Select) scope {
	sc := scope{}
	seen := map[string]bool{}
	derived := func(n sqlparser.SQLNode) (bool, error) {
		sub, ok := n.(*sqlparser.Subquery)
		if !ok {
			return true, nil
		}
		inner, ok := sub.Select.(*sqlparser.Select)
		if !ok {
			return false, nil
		}
		below := scopeOf(inner)
		for _, e := range inner.SelectExprs {
			a, ok := e.(*sqlparser.AliasedExpr)
			if !ok {
				continue
			}
			name := a.As.Lowered()
			if c, ok := a.Expr.(*sqlparser.ColName); ok && name == "" {
				name = c.Name.Lowered()
			}
			if name == "" {
				continue
			}
			if sc[name] = below.typeOf(a.Expr); seen[name] {
				sc[name] = sqlType{}
			}
			seen[name] = true
		}
		return false, nil
	}
	for _, from := range sel.From {
		sqlparser.Walk(derived, from)
	}
	if sel.With != nil {
		for _, c := range sel.With.Ctes {
			if c.AliasedTableExpr != nil && len(c.Columns) == 0 {
				sqlparser.Walk(derived, c.AliasedTableExpr)
			}
		}
	}
	return sc
}

// typeOf infers types from literals, casts, counts and arithmetic alone; columns
// are TEXT and so unknown.
func (sc scope) typeOf(e sqlparser.Expr) sqlType {
	switch x := e.(type) {
	case *sqlparser.ColName:
		return sc[x.Name.Lowered()]
	case *sqlparser.ParenExpr:
		return sc.typeOf(x.Expr)
	case *sqlparser.SQLVal:
		switch x.Type {
		case sqlparser.IntVal:
			return sqlType{kind: typeInt}
		case sqlparser.FloatVal:
			s := string(x.Val)
			if strings.ContainsAny(s, "eE") {
				return sqlType{kind: typeDouble}
			}
			_, frac, _ := strings.Cut(s, ".")
			return sqlType{typeDecimal, len(frac)}
		}
	case *sqlparser.ConvertExpr:
		switch strings.ToLower(x.Type.Type) {
		case "signed", "unsigned", "signed integer", "unsigned integer":
			return sqlType{kind: typeInt}
		case "decimal":
			scale := 0
			if x.Type.Scale != nil {
				scale, _ = strconv.Atoi(string(x.Type.Scale.Val))
			}
			return sqlType{typeDecimal, scale}
		case "double", "float", "real":
			return sqlType{kind: typeDouble}
		}
	case *sqlparser.ComparisonExpr, *sqlparser.IsExpr, *sqlparser.NotExpr, *sqlparser.AndExpr, *sqlparser.OrExpr, *sqlparser.RangeCond, *sqlparser.ExistsExpr:
		return sqlType{kind: typeInt}
	case *sqlparser.UnaryExpr:
		if x.Operator == sqlparser.UMinusStr || x.Operator == sqlparser.UPlusStr {
			return sc.typeOf(x.Expr)
		}
	case *sqlparser.BinaryExpr:
		return binaryType(x.Operator, sc.typeOf(x.Left), sc.typeOf(x.Right))
	case *sqlparser.CaseExpr:
		list := []sqlparser.Expr{}
		for _, w := range x.Whens {
			list = append(list, w.Val)
		}
		if x.Else != nil {
			list = append(list, x.Else)
		}
		return sc.widest(list)
	case *sqlparser.FuncExpr:
		return sc.funcType(x)
	}
	return sqlType{}
}

func binaryType(op string, l, r sqlType) sqlType {
	if !l.exact() || !r.exact() {
		return sqlType{}
	}
	out := sqlType{kind: typeInt, scale: max(l.scale, r.scale)}
	if l.kind == typeDecimal || r.kind == typeDecimal {
		out.kind = typeDecimal
	}
	switch op {
	case sqlparser.PlusStr, sqlparser.MinusStr, sqlparser.ModStr, "mod":
		return out
	case sqlparser.MultStr:
		out.scale = l.scale + r.scale
		return out
	case sqlparser.DivStr:
		return sqlType{typeDecimal, l.scale + 4}
	case sqlparser.IntDivStr:
		return sqlType{kind: typeInt}
	}
	return sqlType{}
}

func (sc scope) widest(list []sqlparser.Expr) sqlType {
	out := sqlType{kind: typeInt}
	for _, e := range list {
		if _, null := e.(*sqlparser.NullVal); null {
			continue
		}
		t := sc.typeOf(e)
		if !t.exact() {
			return sqlType{}
		}
		if t.kind == typeDecimal {
			out.kind = typeDecimal
		}
		out.scale = max(out.scale, t.scale)
	}
	return out
}

func (sc scope) funcType(f *sqlparser.FuncExpr) sqlType {
	args := make([]sqlparser.Expr, 0, len(f.Exprs))
	for _, e := range f.Exprs {
		a, ok := e.(*sqlparser.AliasedExpr)
		if !ok {
			args = append(args, nil)
			continue
		}
		args = append(args, a.Expr)
	}
	name := f.Name.Lowered()
	switch name {
	case "count", "length", "char_length", "character_length", "locate", "instr", "sign", "row_number", "rank", "dense_rank", "ntile":
		return sqlType{kind: typeInt}
	}
	if len(args) == 0 || args[0] == nil {
		return sqlType{}
	}
	first := sc.typeOf(args[0])
	switch name {
	case "sum":
		if first.exact() {
			return sqlType{typeDecimal, first.scale}
		}
	case "avg":
		if first.exact() {
			return sqlType{typeDecimal, first.scale + 4}
		}
	case "min", "max", "abs":
		return first
	case "round", "truncate":
		if !first.exact() {
			return first
		}
		if len(args) == 1 {
			return sqlType{kind: first.kind}
		}
		if v, ok := args[1].(*sqlparser.SQLVal); ok && v.Type == sqlparser.IntVal {
			n, err := strconv.Atoi(string(v.Val))
			if err == nil && first.kind == typeDecimal {
				return sqlType{typeDecimal, min(first.scale, n)}
			}
			return first
		}
	case "floor", "ceil", "ceiling":
		if first.exact() {
			return sqlType{kind: typeInt}
		}
	case "ifnull", "coalesce", "greatest", "least", "mod":
		return sc.widest(args)
	case "if":
		if len(args) == 3 {
			return sc.widest(args[1:])
		}
	case "nullif":
		return first
	}
	return sqlType{}
}

// fullGroupBy finds what ONLY_FULL_GROUP_BY refuses and the embedded engine lets
// through: a bare column of the only table beside an aggregate (1140), or outside
// the GROUP BY list (1055). It judges plain cases alone.
func fullGroupBy(db, query string) *mysql.MySQLError {
	if len(query) > maxParsed || statement(query) != "SELECT" {
		return nil
	}
	stmt, err := sqlparser.Parse(query)
	if err != nil {
		return nil
	}
	sel, ok := stmt.(*sqlparser.Select)
	if !ok || len(sel.From) != 1 {
		return nil
	}
	from, ok := sel.From[0].(*sqlparser.AliasedTableExpr)
	if !ok {
		return nil
	}
	table, ok := from.Expr.(sqlparser.TableName)
	if !ok || !table.DbQualifier.IsEmpty() {
		return nil
	}
	aggregate := false
	grouped := map[string]bool{}
	for _, e := range sel.SelectExprs {
		a, ok := e.(*sqlparser.AliasedExpr)
		if !ok {
			return nil
		}
		if f, ok := a.Expr.(*sqlparser.FuncExpr); ok && f.Over == nil {
			switch f.Name.Lowered() {
			case "count", "sum", "avg", "min", "max":
				aggregate = true
			}
		}
	}
	if !aggregate {
		return nil // without one the engine checks by itself
	}
	for _, g := range sel.GroupBy {
		c, ok := g.(*sqlparser.ColName)
		if !ok {
			return nil
		}
		grouped[c.Name.Lowered()] = true
	}
	if sel.Where != nil { // columns fixed by the condition depend on nothing
		sqlparser.Walk(func(n sqlparser.SQLNode) (bool, error) {
			if c, ok := n.(*sqlparser.ColName); ok {
				grouped[c.Name.Lowered()] = true
			}
			return true, nil
		}, sel.Where.Expr)
	}
	for i, e := range sel.SelectExprs {
		a := e.(*sqlparser.AliasedExpr)
		c, ok := a.Expr.(*sqlparser.ColName)
		if !ok || grouped[c.Name.Lowered()] || !a.As.IsEmpty() && grouped[a.As.Lowered()] {
			continue
		}
		name := db + "." + table.Name.String() + "." + c.Name.String()
		if !from.As.IsEmpty() {
			name = db + "." + from.As.String() + "." + c.Name.String()
		}
		if len(sel.GroupBy) == 0 {
			return sqlError(1140, "42000", "In aggregated query without GROUP BY, expression #%d of SELECT list contains nonaggregated column '%s'; "+
				"this is incompatible with sql_mode=only_full_group_by", i+1, name)
		}
		return notGrouped(i+1, name)
	}
	return nil
}

func notGrouped(expr int, column string) *mysql.MySQLError {
	return sqlError(1055, "42000", "Expression #%d of SELECT list is not in GROUP BY clause and contains nonaggregated column '%s' which is not "+
		"functionally dependent on columns in GROUP BY clause; this is incompatible with sql_mode=only_full_group_by", expr, column)
}
