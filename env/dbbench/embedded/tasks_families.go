package embedded

import (
	"slices"
	"strconv"
	"strings"
)

func ask(s string) Call                  { return Call{SQL: s} }
func final(a ...string) Call             { return Call{Answers: a} }
func quote(s string) string              { return "'" + s + "'" }
func cond(col, val string) string        { return col + " = " + quote(val) }
func plays(query, answer string) Program { return Program{ask(query), final(answer)} }

// Questions quote their values, so that a query copies them letter by letter.

// lookup: one cell by name. The slip is to fetch whole rows and answer with the
// first value.
func (g *gen) lookup() draft {
	s := one(g, schemas())
	t := g.short(s, "")
	c := 1 + g.IntN(3)
	r := one(g, t.Rows)
	col := t.Columns[c].Name
	where := " FROM " + t.Name + " WHERE " + cond("name", r[0])
	good, bad := "SELECT "+col+where, "SELECT *"+where
	return draft{
		ok: true, kind: "other", table: t, answers: []string{r[c]},
		question: "What is the " + col + " when name is " + quote(r[0]) + "?",
		good:     plays(good, r[c]), sloppy: plays(bad, r[0]), recover: Program{ask(bad), ask(good), final(r[c])},
	}
}

// count: rows that meet one condition. The slip is to count all rows.
func (g *gen) count() draft {
	s := one(g, schemas())
	t := g.short(s, "")
	c := 1 + g.IntN(2)
	v := one(g, t.Rows)[c]
	n := len(t.col(0, c, v))
	good := "SELECT COUNT(*) FROM " + t.Name + " WHERE " + cond(t.Columns[c].Name, v)
	bad := "SELECT COUNT(*) FROM " + t.Name
	return draft{
		ok: n < len(t.Rows), kind: "counting", table: t, answers: []string{strconv.Itoa(n)},
		question: "How many " + t.Name + " have " + t.Columns[c].Name + " " + quote(v) + "?",
		good:     plays(good, strconv.Itoa(n)), sloppy: plays(bad, strconv.Itoa(len(t.Rows))),
		recover: Program{ask(bad), ask(good), final(strconv.Itoa(n))},
	}
}

// quoted: a lookup in a column whose name is a reserved word. The slip is to
// leave the back-ticks out and to answer from the error.
func (g *gen) quoted() draft {
	s := one(g, schemas())
	t := g.short(s, one(g, reservedColumns[:]))
	r := one(g, t.Rows)
	col := t.Columns[3].Name
	where := " FROM " + t.Name + " WHERE " + cond("name", r[0])
	good, bad := "SELECT `"+col+"`"+where, "SELECT "+col+where
	return draft{
		ok: true, kind: "other", table: t, answers: []string{r[3]},
		question: "What is the " + col + " when name is " + quote(r[0]) + "?",
		good:     plays(good, r[3]), sloppy: plays(bad, "unknown"), recover: Program{ask(bad), ask(good), final(r[3])},
	}
}

// aggregate: the largest or smallest number, or its owner. Every column is text,
// so the slip is to compare without CAST.
func (g *gen) aggregate() draft {
	s := one(g, schemas())
	t := g.short(s, "")
	texts := t.col(3)
	nums := numbers(texts)
	large := g.IntN(2) == 0
	word, fn, dir := "smallest", "MIN", ""
	best, lexical := slices.Min(nums), slices.Min(texts)
	if large {
		word, fn, dir = "largest", "MAX", " DESC"
		best, lexical = slices.Max(nums), slices.Max(texts)
	}
	right := strconv.Itoa(best)
	d := draft{ok: right != lexical, table: t}
	cast := "CAST(" + s.num + " AS SIGNED)"
	if g.IntN(2) == 0 {
		d.kind = "aggregation-" + fn
		d.question = "What is the " + word + " " + s.num + " in " + t.Name + "?"
		d.answers = []string{right}
		good, bad := "SELECT "+fn+"("+cast+") FROM "+t.Name, "SELECT "+fn+"("+s.num+") FROM "+t.Name
		d.good, d.sloppy, d.recover = plays(good, right), plays(bad, lexical), Program{ask(bad), ask(good), final(right)}
		return d
	}
	d.kind = "ranking"
	d.question = "Which name has the " + word + " " + s.num + " in " + t.Name + "?"
	owner, wrong := t.col(0, 3, right)[0], t.col(0, 3, lexical)[0]
	d.answers = []string{owner}
	order := func(by string) string { return "SELECT name FROM " + t.Name + " ORDER BY " + by + dir + " LIMIT 1" }
	d.good, d.sloppy = plays(order(cast), owner), plays(order(s.num), wrong)
	d.recover = Program{ask(order(s.num)), ask(order(cast)), final(owner)}
	return d
}

// distinct: how many different values. The slip is to count rows.
func (g *gen) distinct() draft {
	s := one(g, schemas())
	t := g.short(s, "")
	c := 1 + g.IntN(2)
	col := t.Columns[c].Name
	vals := t.col(c)
	slices.Sort(vals)
	n := strconv.Itoa(len(slices.Compact(vals)))
	good, bad := "SELECT COUNT(DISTINCT "+col+") FROM "+t.Name, "SELECT COUNT("+col+") FROM "+t.Name
	return draft{
		ok: true, kind: "counting", table: t, answers: []string{n}, // at most 4 values in at least 6 rows
		question: "How many different " + col + " values are in " + t.Name + "?",
		good:     plays(good, n), sloppy: plays(bad, strconv.Itoa(len(t.Rows))), recover: Program{ask(bad), ask(good), final(n)},
	}
}

// intersect: two conditions that must both hold. The slip is to keep the first
// alone.
func (g *gen) intersect() draft {
	s := one(g, schemas())
	t := g.short(s, "")
	r := one(g, t.Rows)
	a, b := 1, 2
	if g.IntN(2) == 0 {
		a, b = 2, 1
	}
	both, first := t.col(0, a, r[a], b, r[b]), t.col(0, a, r[a])
	words := t.Columns[a].Name + " " + quote(r[a]) + " and " + t.Columns[b].Name + " " + quote(r[b]) + "?"
	loose := " FROM " + t.Name + " WHERE " + cond(t.Columns[a].Name, r[a])
	tight := loose + " AND " + cond(t.Columns[b].Name, r[b])
	d := draft{ok: len(first) > len(both), table: t}
	if g.IntN(2) == 0 {
		d.kind = "counting"
		d.question = "How many " + t.Name + " have " + words
		right := strconv.Itoa(len(both))
		d.answers = []string{right}
		d.good, d.sloppy = plays("SELECT COUNT(*)"+tight, right), plays("SELECT COUNT(*)"+loose, strconv.Itoa(len(first)))
		d.recover = Program{d.sloppy[0], d.good[0], d.good[1]}
		return d
	}
	d.ok = len(both) == 1 && len(first) > 2 // a guess among the first is wrong more often than not
	d.kind = "other"
	d.question = "Which name has " + words
	d.answers = both
	d.good = Program{ask("SELECT name" + tight), final(both...)}
	d.sloppy = Program{ask("SELECT name" + loose), final(first...)}
	d.recover = Program{d.sloppy[0], d.good[0], d.good[1]}
	return d
}

// paged: a question about a table whose listing is cut. The slip is to list it
// and answer from what is visible.
func (g *gen) paged() draft {
	s := one(g, longSchemas())
	t := g.long(s)
	seen := t
	seen.Rows = t.Rows[:visible(t.Rows)]
	list := "SELECT * FROM " + t.Name
	d := draft{table: t}
	var good, right, wrong string
	d.kind = "counting"
	if g.IntN(3) == 0 {
		d.question = "How many rows are in " + t.Name + "?"
		good, right, wrong = "SELECT COUNT(*) FROM "+t.Name, strconv.Itoa(len(t.Rows)), strconv.Itoa(len(seen.Rows))
	} else { // under a condition
		c := 1 + g.IntN(2)
		v := one(g, t.Rows)[c]
		d.question = "How many rows of " + t.Name + " have " + t.Columns[c].Name + " " + quote(v) + "?"
		good, right = "SELECT COUNT(*) FROM "+t.Name+" WHERE "+cond(t.Columns[c].Name, v), strconv.Itoa(len(t.col(0, c, v)))
		wrong = strconv.Itoa(len(seen.col(0, c, v)))
	}
	d.ok = right != wrong && len(seen.Rows) < len(t.Rows)
	d.answers = []string{right}
	d.good, d.sloppy, d.recover = plays(good, right), plays(list, wrong), Program{ask(list), ask(good), final(right)}
	return d
}

// insert: add one row. The slip is to leave the last value out, which the server
// refuses, and to commit all the same.
func (g *gen) insert() draft {
	s := one(g, schemas())
	t := g.short(s, "")
	last := len(t.Rows) - 1
	r := t.Rows[last]
	t.Rows = t.Rows[:last]
	values := func(r []string) string {
		return "INSERT INTO " + t.Name + " VALUES (" + quote(strings.Join(r, "', '")) + ")"
	}
	good, bad := values(r), values(r[:3])
	return draft{
		ok: true, kind: "INSERT", table: t, after: append(slices.Clone(t.Rows), r),
		question: "Add to " + t.Name + ": " + quote(strings.Join(r, "', '")) + ".",
		good:     plays(good, "done"), sloppy: plays(bad, "done"), recover: Program{ask(bad), ask(good), final("done")},
	}
}

// update: set a number where two conditions hold. The slip is to filter by the
// first alone. Its repair looks at the rows before it changes any.
func (g *gen) update() draft {
	s := one(g, schemas())
	t := g.short(s, "")
	r := one(g, t.Rows)
	both, first := t.col(0, 1, r[1], 2, r[2]), t.col(0, 1, r[1])
	n := strconv.Itoa(g.number())
	fresh := !slices.Contains(t.col(3), n)
	after := make([][]string, len(t.Rows))
	for i, row := range t.Rows {
		after[i] = row
		if matches(row, 1, r[1], 2, r[2]) {
			after[i] = []string{row[0], row[1], row[2], n}
		}
	}
	set := "UPDATE " + t.Name + " SET " + cond(s.num, n) + " WHERE "
	loose := cond(s.a, r[1])
	tight := loose + " AND " + cond(s.b, r[2])
	return draft{
		ok: fresh && len(first) > len(both), kind: "UPDATE", table: t, after: after,
		question: "Set " + s.num + " to " + quote(n) + " where " + s.a + " is " + quote(r[1]) + " and " + s.b + " is " + quote(r[2]) + ".",
		good:     plays(set+tight, "done"), sloppy: plays(set+loose, "done"),
		recover: Program{ask("SELECT name FROM " + t.Name + " WHERE " + loose), ask(set + tight), final("done")},
	}
}

// remove: delete the rows of one value. The slip is to look at them and commit
// as if they were gone.
func (g *gen) remove() draft {
	s := one(g, schemas())
	t := g.short(s, "")
	c := 1 + g.IntN(2)
	v := one(g, t.Rows)[c]
	var after [][]string
	for _, r := range t.Rows {
		if r[c] != v {
			after = append(after, r)
		}
	}
	where := " FROM " + t.Name + " WHERE " + cond(t.Columns[c].Name, v)
	good, look := "DELETE"+where, "SELECT name"+where
	return draft{
		ok: len(after) > 0, kind: "DELETE", table: t, after: after,
		question: "Delete from " + t.Name + " all rows with " + t.Columns[c].Name + " " + quote(v) + ".",
		good:     plays(good, "done"), sloppy: plays(look, "done"), recover: Program{ask(look), ask(good), final("done")},
	}
}
