package embedded

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Task is one generated TinyDB task: a row in the ordinary file format, and
// three scripted ways to play it. Labels and digests are computed here, never
// by the engine under test. A Task is immutable.
type Task struct {
	ID         string // family and the first 10 hex digits of the content hash
	Split      string // train, val or test
	Family     string
	Causes     []string // failure causes (envs.md 5.3) its sloppy play shows
	Hard       bool
	Difficulty int // 1 easy, 2 hard
	Row        Row

	Good    Program // solves it directly
	Sloppy  Program // the habit that fails
	Recover Program // starts like Sloppy, notices, and solves it
}

// Program is a scripted episode: tool calls, one per turn.
type Program []Call

// Call is one tool call: SQL for execute_sql, Answers for commit_final_answer.
type Call struct {
	SQL     string
	Answers []string // commit when SQL is empty
}

// Text is the assistant turn in the policy's tool-call syntax (model.md 5.5).
func (c Call) Text() string {
	name, key, val := "execute_sql", "query", c.SQL
	if c.SQL == "" {
		name, key = "commit_final_answer", "answers"
		b, err := json.Marshal(c.Answers)
		if err != nil || c.Answers == nil {
			b = []byte("[]")
		}
		val = strings.ReplaceAll(string(b), `","`, `", "`)
	}
	return "<tool_call>\n<function=" + name + ">\n<parameter=" + key + ">\n" + val + "\n</parameter>\n</function>\n</tool_call>"
}

// Turns renders every call.
func (p Program) Turns() []string {
	out := make([]string, len(p))
	for i, c := range p {
		out[i] = c.Text()
	}
	return out
}

// Family describes one task family.
type Family struct {
	Name   string
	Causes []string
	Hard   bool
	Weight int // share in the default mix

	make func(g *gen) draft
}

// Families lists the task families in a fixed order.
func Families() []Family {
	return []Family{
		{"lookup", nil, false, 3, (*gen).lookup},
		{"count", nil, false, 2, (*gen).count},
		{"insert", []string{"D-DML"}, false, 2, (*gen).insert},
		{"quoted", []string{"D-SCHEMA"}, true, 2, (*gen).quoted},
		{"aggregate", []string{"D-TYPE"}, true, 3, (*gen).aggregate},
		{"distinct", []string{"D-AGG"}, true, 2, (*gen).distinct},
		{"intersect", []string{"D-SET"}, true, 3, (*gen).intersect},
		{"paged", []string{"D-PROTO"}, true, 2, (*gen).paged},
		{"update", []string{"D-DML", "D-SET"}, true, 3, (*gen).update},
		{"delete", []string{"D-DONE"}, true, 2, (*gen).remove},
	}
}

// Mix gives families their weights; a family that is absent is left out. Nil is
// the default mix.
type Mix map[string]int

// Generate returns task number index of a split under the default mix. It is a
// pure function: the same arguments always give the same task. Splits are
// disjoint for every seed, because a task's content decides its split.
func Generate(seed uint64, split string, index int) (Task, error) {
	return GenerateMix(nil, seed, split, index)
}

// GenerateMix is Generate with chosen family weights.
func GenerateMix(mix Mix, seed uint64, split string, index int) (Task, error) {
	if split != "train" && split != "val" && split != "test" {
		return Task{}, fmt.Errorf("generate task: split %q, want train, val or test", split)
	}
	if index < 0 {
		return Task{}, fmt.Errorf("generate task: index %d < 0", index)
	}
	fams := Families()
	total := 0
	for i := range fams {
		if mix != nil {
			fams[i].Weight = mix[fams[i].Name]
		}
		if fams[i].Weight < 0 {
			return Task{}, fmt.Errorf("generate task: family %s has weight %d", fams[i].Name, fams[i].Weight)
		}
		total += fams[i].Weight
	}
	for name := range mix {
		if !slices.ContainsFunc(fams, func(f Family) bool { return f.Name == name }) {
			return Task{}, fmt.Errorf("generate task: unknown family %q", name)
		}
	}
	if total == 0 {
		return Task{}, fmt.Errorf("generate task: every family has weight 0")
	}
	pick := newGen(seed, split, index, -1).IntN(total)
	fam := fams[0]
	for _, f := range fams {
		if pick < f.Weight {
			fam = f
			break
		}
		pick -= f.Weight
	}
	// A draft lands in the wanted split with probability >= 1/10, so this many
	// tries all miss once in 10^90 tasks.
	for try := range 2000 {
		g := newGen(seed, split, index, try)
		d := fam.make(g)
		if !d.ok {
			continue
		}
		t := d.task(fam)
		if t.Split == split {
			return t, nil
		}
	}
	return Task{}, fmt.Errorf("generate task %d of %s (seed %d): family %s found none", index, split, seed, fam.Name)
}

// splitOf maps a content hash to its split: 8, 1 and 1 tenths.
func splitOf(sum [32]byte) string {
	switch binary.LittleEndian.Uint64(sum[8:]) % 10 {
	case 8:
		return "val"
	case 9:
		return "test"
	}
	return "train"
}

// draft is a task before its content is hashed.
type draft struct {
	ok       bool // false: the random table does not suit the family
	question string
	kind     string // Row.Type
	table    Table
	answers  []string   // SELECT gold
	after    [][]string // modification: rows afterwards
	good     Program
	sloppy   Program
	recover  Program
}

func (d draft) task(f Family) Task {
	cols := make([]string, len(d.table.Columns))
	for i, c := range d.table.Columns {
		cols[i] = c.Name
	}
	row := Row{
		Description:    d.question,
		AddDescription: d.table.Name + "(" + strings.Join(cols, ", ") + ")",
		Type:           []string{d.kind},
		Tables:         []Table{d.table},
		Heads:          cols,
		Source:         "tinydb",
	}
	gold := d.good[0].SQL
	if d.after != nil {
		row.Label = []string{gold}
		sum := Tuple(TableMD5(d.after))
		row.AnswerMD5 = &sum
	} else {
		row.Label = d.answers
		row.SQL = gold
	}
	content, err := json.Marshal([]any{d.question, row.AddDescription, d.table.Rows})
	if err != nil {
		panic(fmt.Sprintf("hash task: %v", err)) // strings only
	}
	sum := sha256.Sum256(content)
	t := Task{
		ID: f.Name + "-" + hex.EncodeToString(sum[:5]), Split: splitOf(sum), Family: f.Name, Causes: f.Causes, Hard: f.Hard, Difficulty: 1,
		Row: row, Good: d.good, Sloppy: d.sloppy, Recover: d.recover,
	}
	if f.Hard {
		t.Difficulty = 2
	}
	return t
}

// gen draws one task.
type gen struct{ *rand.Rand }

func newGen(seed uint64, split string, index, try int) *gen {
	sum := sha256.Sum256(fmt.Appendf(nil, "tinydb 1|%d|%s|%d|%d", seed, split, index, try))
	return &gen{rand.New(rand.NewPCG(binary.LittleEndian.Uint64(sum[:]), binary.LittleEndian.Uint64(sum[8:])))}
}

func one[T any](g *gen, from []T) T { return from[g.IntN(len(from))] }
