package harness

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Pred is a predicate over facts (envs.md 5.2): one of All, Any, Not, or a leaf
// that compares fact F with V. An empty Pred is true.
//
// Leaf operators: eq ne lt le gt ge in contains matches exists. A missing fact
// makes every leaf false except exists=false and ne. Scope is step (the last
// action), episode (latest value, the default) or last:n (any of the last n
// actions).
type Pred struct {
	All   []Pred `toml:"all" json:"all,omitempty"`
	Any   []Pred `toml:"any" json:"any,omitempty"`
	Not   *Pred  `toml:"not" json:"not,omitempty"`
	F     string `toml:"f" json:"f,omitempty"`
	Op    string `toml:"op" json:"op,omitempty"`
	V     any    `toml:"v" json:"v,omitempty"`
	Scope string `toml:"scope" json:"scope,omitempty"`
}

// test is a compiled predicate.
type test func(f *facts) bool

func (p *Pred) compile() (test, error) {
	if p == nil {
		return func(*facts) bool { return true }, nil
	}
	forms := 0
	for _, set := range []bool{len(p.All) > 0, len(p.Any) > 0, p.Not != nil, p.F != ""} {
		if set {
			forms++
		}
	}
	switch {
	case forms == 0:
		return func(*facts) bool { return true }, nil
	case forms > 1:
		return nil, errors.New("predicate: give one of all, any, not or f")
	case p.Not != nil:
		t, err := p.Not.compile()
		if err != nil {
			return nil, err
		}
		return func(f *facts) bool { return !t(f) }, nil
	case p.F == "":
		subs := p.All
		if len(p.Any) > 0 {
			subs = p.Any
		}
		tests := make([]test, len(subs))
		for i := range subs {
			t, err := subs[i].compile()
			if err != nil {
				return nil, err
			}
			tests[i] = t
		}
		if len(p.Any) > 0 {
			return func(f *facts) bool {
				return slices.ContainsFunc(tests, func(t test) bool { return t(f) })
			}, nil
		}
		return func(f *facts) bool {
			return !slices.ContainsFunc(tests, func(t test) bool { return !t(f) })
		}, nil
	}
	return p.leaf()
}

func (p *Pred) leaf() (test, error) {
	cmp, err := comparison(p.Op, p.V)
	if err != nil {
		return nil, fmt.Errorf("predicate on %q: %w", p.F, err)
	}
	name := p.F
	switch {
	case p.Scope == "" || p.Scope == "episode":
		return func(f *facts) bool { return cmp(f.get(name)) }, nil
	case p.Scope == "step":
		return func(f *facts) bool { return cmp(f.step(name, 0)) }, nil
	case strings.HasPrefix(p.Scope, "last:"):
		n, err := strconv.Atoi(p.Scope[len("last:"):])
		if err != nil || n < 1 {
			return nil, fmt.Errorf("predicate on %q: scope %q, want last:n with n >= 1", p.F, p.Scope)
		}
		return func(f *facts) bool {
			for i := range min(n, len(f.steps)) {
				if cmp(f.step(name, i)) {
					return true
				}
			}
			return false
		}, nil
	}
	return nil, fmt.Errorf("predicate on %q: scope %q, want step, episode or last:n", p.F, p.Scope)
}

// comparison builds the test of one value; ok is false for a missing fact.
func comparison(op string, want any) (func(got any, ok bool) bool, error) {
	switch op {
	case "exists":
		need := want != false
		return func(_ any, ok bool) bool { return ok == need }, nil
	case "eq":
		return func(g any, ok bool) bool { return ok && equal(g, want) }, nil
	case "ne":
		return func(g any, ok bool) bool { return !ok || !equal(g, want) }, nil
	case "lt", "le", "gt", "ge":
		w, isNum := number(want)
		if !isNum {
			return nil, fmt.Errorf("%s needs a number, got %v", op, want)
		}
		return func(g any, ok bool) bool {
			x, num := number(g)
			if !ok || !num {
				return false
			}
			switch op {
			case "lt":
				return x < w
			case "le":
				return x <= w
			case "gt":
				return x > w
			}
			return x >= w
		}, nil
	case "in":
		list := reflect.ValueOf(want)
		if want == nil || list.Kind() != reflect.Slice {
			return nil, fmt.Errorf("in needs a list, got %v", want)
		}
		return func(g any, ok bool) bool {
			for i := range list.Len() {
				if ok && equal(g, list.Index(i).Interface()) {
					return true
				}
			}
			return false
		}, nil
	case "contains":
		return func(g any, ok bool) bool {
			if !ok {
				return false
			}
			if s, isText := g.(string); isText {
				w, wText := want.(string)
				return wText && strings.Contains(strings.ToLower(s), strings.ToLower(w))
			}
			v := reflect.ValueOf(g)
			if g == nil || v.Kind() != reflect.Slice {
				return false
			}
			for i := range v.Len() {
				if equal(v.Index(i).Interface(), want) {
					return true
				}
			}
			return false
		}, nil
	case "matches":
		w, isText := want.(string)
		if !isText {
			return nil, fmt.Errorf("matches needs a pattern, got %v", want)
		}
		re, err := regexp.Compile(w)
		if err != nil {
			return nil, fmt.Errorf("matches: %w", err)
		}
		return func(g any, ok bool) bool {
			s, text := g.(string)
			return ok && text && re.MatchString(s)
		}, nil
	}
	return nil, fmt.Errorf("operator %q, want eq ne lt le gt ge in contains matches exists", op)
}

func equal(a, b any) bool {
	x, xn := number(a)
	y, yn := number(b)
	if xn && yn {
		return x == y
	}
	switch av := a.(type) {
	case string:
		bv, ok := b.(string)
		return ok && av == bv
	case bool:
		bv, ok := b.(bool)
		return ok && av == bv
	}
	return reflect.DeepEqual(a, b)
}

// number reads any Go numeric kind.
func number(v any) (float64, bool) {
	if v == nil {
		return 0, false
	}
	r := reflect.ValueOf(v)
	switch {
	case r.CanInt():
		return float64(r.Int()), true
	case r.CanUint():
		return float64(r.Uint()), true
	case r.CanFloat():
		return r.Float(), true
	}
	return 0, false
}
