package embedded

import (
	"strings"

	"github.com/dolthub/go-mysql-server/memory"
	gsql "github.com/dolthub/go-mysql-server/sql"
	"github.com/dolthub/go-mysql-server/sql/expression/function"
	"github.com/dolthub/go-mysql-server/sql/types"
)

// maxString is the longest string the capped functions build; longer results
// are NULL, as MySQL does beyond max_allowed_packet.
const maxString = 16 << 20

// provider is the in-memory database provider with the functions replaced that
// could allocate without bound in one call, before any watchdog can see it.
type provider struct{ *memory.DbProvider }

// Function implements gsql.FunctionProvider; the engine asks it first.
func (p provider) Function(_ *gsql.Context, name string) (gsql.Function, bool) {
	build := func(a []gsql.Expression) (gsql.Expression, error) { return nil, nil }
	arity := 0
	switch strings.ToLower(name) {
	case "repeat":
		arity, build = 2, func(a []gsql.Expression) (gsql.Expression, error) { return function.NewRepeat(a[0], a[1]), nil }
	case "space":
		arity, build = 1, func(a []gsql.Expression) (gsql.Expression, error) { return function.NewSpace(a[0]), nil }
	case "lpad":
		arity, build = 3, func(a []gsql.Expression) (gsql.Expression, error) { return function.NewLeftPad(a...) }
	case "rpad":
		arity, build = 3, func(a []gsql.Expression) (gsql.Expression, error) { return function.NewRightPad(a...) }
	default:
		return nil, false
	}
	name = strings.ToLower(name)
	return gsql.FunctionN{Name: name, Fn: func(a ...gsql.Expression) (gsql.Expression, error) {
		if len(a) != arity {
			return nil, gsql.ErrInvalidArgumentNumber.New(name, arity, len(a))
		}
		return newCapped(name, build, a)
	}}, true
}

// capped evaluates to NULL instead of building a string beyond maxString.
type capped struct {
	gsql.Expression
	name  string
	build func([]gsql.Expression) (gsql.Expression, error)
}

func newCapped(name string, build func([]gsql.Expression) (gsql.Expression, error), a []gsql.Expression) (gsql.Expression, error) {
	e, err := build(a)
	if err != nil {
		return nil, err
	}
	return &capped{e, name, build}, nil
}

// Eval implements gsql.Expression.
func (c *capped) Eval(ctx *gsql.Context, row gsql.Row) (any, error) {
	args := c.Children()
	at, unit := len(args)-1, int64(1)
	if c.name != "space" {
		at = 1
	}
	if c.name == "repeat" {
		v, err := args[0].Eval(ctx, row)
		if v == nil || err != nil {
			return nil, err
		}
		s, _, err := types.LongText.Convert(ctx, v)
		if err != nil {
			return nil, err
		}
		if str, ok := s.(string); ok {
			unit = int64(len(str))
		}
	}
	v, err := args[at].Eval(ctx, row)
	if v == nil || err != nil {
		return nil, err
	}
	n, _, err := types.Float64.Convert(ctx, v)
	if f, ok := n.(float64); err == nil && ok && f*float64(unit) > maxString {
		return nil, nil
	}
	if f, ok := n.(float64); err == nil && ok && f < 1 && (c.name == "repeat" || c.name == "space") {
		return "", nil
	}
	return c.Expression.Eval(ctx, row)
}

// WithChildren implements gsql.Expression.
func (c *capped) WithChildren(a ...gsql.Expression) (gsql.Expression, error) {
	return newCapped(c.name, c.build, a)
}
