package trainer

import (
	"fmt"
	"slices"
	"sort"

	"harness-s/env/harness"
	"harness-s/model"
	"harness-s/model/chat"
)

// minShare is the shortest common run of tokens that is worth a segment of its
// own. What members share beyond that, a prompt above all, is computed once.
const minShare = 16

// target is one position with a gradient: token tok of trajectory traj, counted
// over the policy tokens of all its segments.
type target struct{ traj, tok int }

// microbatch is a packed forest (gpu.md 7.5) and, for each of its (row, target)
// pairs, the token it belongs to.
type microbatch struct {
	model.Batch
	at []target
}

// sequence is one ledger segment as training sees it.
type sequence struct {
	ids  []int32 // up to and including the last target
	pos  []int   // positions of policy tokens, ascending; position 0 has no predictor
	from int     // number of targets in earlier segments of the trajectory
	traj int
}

// columns belong to the policy tokens of a trajectory, over all segments in order.
type columns struct {
	logProb []float32
	turn    []int32
}

// sequencesOf cuts a ledger into sequences. Only tokens the policy produced are
// targets (R20); a segment without any is left out.
func sequencesOf(segs []harness.LedgerSegment, traj int) (seqs []sequence, c columns) {
	for i := range segs {
		s := &segs[i]
		q := sequence{traj: traj, from: len(c.logProb)}
		for t, k := range s.Kind {
			if k != chat.KindPolicy || t == 0 {
				continue
			}
			q.pos = append(q.pos, t)
			c.logProb = append(c.logProb, s.LogProb[t])
			c.turn = append(c.turn, s.Turn[t])
		}
		if len(q.pos) > 0 {
			q.ids = s.IDs[:q.pos[len(q.pos)-1]+1]
			seqs = append(seqs, q)
		}
	}
	return seqs, c
}

// node is a run of tokens in the tree of a group's contexts.
type node struct {
	parent   *node
	pos      int // position of its first token
	ids      []int32
	children []*node
	segment  int32 // assigned by layout
	row      int32
}

// tree merges common prefixes. Order of insertion decides the layout.
type tree struct {
	roots []*node
	leafs []*node // last node of each inserted sequence
	seqs  []sequence
	rows  int
	pairs int
}

// packLimits are the most rows, (row, target) pairs and states of the delta rule of a microbatch; states 0 = any number.
type packLimits struct{ rows, pairs, states int }

func (d *Deps) limits() packLimits { return packLimits{d.MaxRows, d.MaxTargets, d.MaxStates} }

// over reports whether a tree is too large for a microbatch. With more sequences in the tree no count falls.
func (l packLimits) over(t *tree) bool {
	return t.rows > l.rows || t.pairs > l.pairs || l.states > 0 && t.states() > l.states
}

// states counts the states of the delta rule.
func (t *tree) states() (n int) {
	var count func(ns []*node)
	count = func(ns []*node) {
		for _, x := range ns {
			n += model.NumStates(len(x.ids))
			count(x.children)
		}
	}
	count(t.roots)
	return n
}

// insert adds a sequence; its last token needs no row, because nothing follows it.
func (t *tree) insert(q sequence) {
	ids := q.ids[:len(q.ids)-1]
	var at *node
	for pos := 0; ; {
		list := t.roots
		if at != nil {
			list = at.children
		}
		var next *node
		for _, c := range list {
			m := common(c.ids, ids[pos:])
			switch {
			case m == len(c.ids) || pos+m == len(ids) && m > 0:
				next = c
			case m >= minShare:
				t.split(c, m)
				next = c.parent
			default:
				continue
			}
			pos += m
			break
		}
		if next == nil {
			if pos < len(ids) {
				next = &node{parent: at, pos: pos, ids: ids[pos:]}
				t.rows += len(next.ids)
				if at == nil {
					t.roots = append(t.roots, next)
				} else {
					at.children = append(at.children, next)
				}
				at = next
			}
			break
		}
		at = next
		if pos == len(ids) {
			break
		}
	}
	t.leafs, t.seqs = append(t.leafs, at), append(t.seqs, q)
	t.pairs += len(q.pos)
}

func common(a, b []int32) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// split makes the first m tokens of c a node of their own above c.
func (t *tree) split(c *node, m int) {
	top := &node{parent: c.parent, pos: c.pos, ids: c.ids[:m], children: []*node{c}}
	list := &t.roots
	if c.parent != nil {
		list = &c.parent.children
	}
	(*list)[slices.Index(*list, c)] = top
	c.parent, c.pos, c.ids = top, c.pos+m, c.ids[m:]
}

// layout appends the tree to b.
func (t *tree) layout(b *microbatch) {
	var place func(n *node, parent int32)
	place = func(n *node, parent int32) {
		n.segment, n.row = int32(len(b.Segments)), int32(len(b.IDs))
		b.Segments = append(b.Segments, model.Segment{Len: int32(len(n.ids)), Parent: parent, Pos: int32(n.pos)})
		b.IDs = append(b.IDs, n.ids...)
		for _, c := range n.children {
			place(c, n.segment)
		}
	}
	for _, r := range t.roots {
		place(r, -1)
	}
	for i, q := range t.seqs {
		n := t.leafs[i]
		for j := len(q.pos) - 1; j >= 0; j-- {
			p := q.pos[j] - 1
			for p < n.pos {
				n = n.parent
			}
			b.Rows = append(b.Rows, n.row+int32(p-n.pos))
			b.Targets = append(b.Targets, q.ids[q.pos[j]])
			b.at = append(b.at, target{q.traj, q.from + j})
		}
	}
}

// finish orders the pairs by row, then trajectory and token.
func (b *microbatch) finish() {
	order := make([]int, len(b.Rows))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(x, y int) int {
		if d := int(b.Rows[x]) - int(b.Rows[y]); d != 0 {
			return d
		}
		if d := b.at[x].traj - b.at[y].traj; d != 0 {
			return d
		}
		return b.at[x].tok - b.at[y].tok
	})
	rows, targets, at := make([]int32, len(order)), make([]int32, len(order)), make([]target, len(order))
	for i, j := range order {
		rows[i], targets[i], at[i] = b.Rows[j], b.Targets[j], b.at[j]
	}
	b.Rows, b.Targets, b.at = rows, targets, at
}

// pack turns trajectories into microbatches within the limits, in order; units[i]
// are the sequences of one trajectory, which stay together. Whatever the members
// of a microbatch have in common is computed once: the prompt of a group above
// all, and what groups share of it.
func pack(units [][]sequence, most packLimits) ([]*microbatch, error) {
	var out []*microbatch
	for len(units) > 0 {
		over := func(n int) bool { return most.over(build(units[:n])) }
		// The counts grow with n, so the largest n that fits is found by halving.
		n := sort.Search(len(units), func(n int) bool { return over(n + 1) })
		if n == 0 {
			t := build(units[:1])
			if t.rows <= most.rows && t.pairs <= most.pairs {
				return nil, hinted("pack batch", "raise model.micro_rows, or lower rollout.max_turns",
					"one trajectory has %d states of the delta rule, which memory is planned with %d of for a microbatch of %d rows: its parts are many and short", t.states(), most.states, most.rows)
			}
			return nil, hinted("pack batch", "lower model.max_len or rollout.max_turns, or raise the rows of a microbatch",
				"one trajectory has %d rows and %d targets, a microbatch holds %d and %d", t.rows, t.pairs, most.rows, most.pairs)
		}
		b := &microbatch{}
		build(units[:n]).layout(b)
		if b.finish(); len(b.at) > 0 {
			out = append(out, b)
		}
		units = units[n:]
	}
	return out, nil
}

func build(units [][]sequence) *tree {
	t := &tree{}
	for _, unit := range units {
		for _, q := range unit {
			t.insert(q)
		}
	}
	return t
}

// checkPacked asserts that every token of every trajectory is the target of exactly one
// pair, and predicted by the row of the token before it.
func checkPacked(bs []*microbatch, counts []int) error {
	seen := make([][]bool, len(counts))
	for i, n := range counts {
		seen[i] = make([]bool, n)
	}
	for _, b := range bs {
		for i, a := range b.at {
			if a.traj >= len(seen) || a.tok >= len(seen[a.traj]) || seen[a.traj][a.tok] {
				return fmt.Errorf("check batch: token %d of trajectory %d is unknown or packed twice", a.tok, a.traj)
			}
			seen[a.traj][a.tok] = true
			if i > 0 && b.Rows[i] < b.Rows[i-1] {
				return fmt.Errorf("check batch: row %d follows row %d", b.Rows[i], b.Rows[i-1])
			}
		}
	}
	for i := range seen {
		if j := slices.Index(seen[i], false); j >= 0 {
			return fmt.Errorf("check batch: token %d of trajectory %d is not packed", j, i)
		}
	}
	return nil
}
