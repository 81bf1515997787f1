package embedded

import (
	"crypto/md5"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
)

// schema is an original table layout: a name, two category columns with
// disjoint values, and a number.
type schema struct {
	table  string
	a, b   string // category columns
	av, bv []string
	num    string
}

// Tables, names, values and numbers are few on purpose: a policy of two million parameters must learn to pick the ones a question
// names, and is to be told apart by its habits, not by its spelling.
func schemas() []schema {
	return []schema{
		{"ferries", "port", "deck", []string{"Lund", "Brae", "Oban"}, []string{"open", "low", "high"}, "crew"},
		{"buoys", "color", "state", []string{"red", "green", "white"}, []string{"lit", "dark", "lost"}, "depth"},
		{"seeds", "soil", "shelf", []string{"sand", "loam", "peat"}, []string{"top", "east", "west"}, "weight"},
		{"hives", "wood", "honey", []string{"pine", "oak", "cedar"}, []string{"lime", "clover", "thyme"}, "frames"},
	}
}

// paged tables are long enough that listing one overflows the observation.
func longSchemas() []schema {
	return []schema{
		{table: "parcels", a: "port", b: "size", av: []string{"Lund", "Brae", "Oban"}, bv: []string{"small", "large", "heavy"}},
		{table: "plots", a: "soil", b: "crop", av: []string{"sand", "loam", "peat"}, bv: []string{"beans", "maize", "barley"}},
	}
}

// names are the keys of every short table.
var names = [...]string{"Otter", "Heron", "Finch", "Raven", "Swift", "Crane", "Eagle", "Robin"}

// reserved words of MySQL 8 and of MariaDB alike that make plausible column names. "rank" is reserved in MySQL 8 only: unquoted it
// would fail on one server and work on the other.
var reservedColumns = [...]string{"order", "group"}

func column(n, typ string) Column { return Column{Name: n, Type: typ} }

// short fills a table of 6-10 rows; num renames the number column when set.
func (g *gen) short(s schema, num string) Table {
	if num == "" {
		num = s.num
	}
	t := Table{Name: s.table, Columns: []Column{column("name", "text"), column(s.a, "text"), column(s.b, "text"), column(num, "number")}}
	perm := g.Perm(len(names))
	used := map[int]bool{}
	for i := range 6 + g.IntN(len(names)-5) {
		n := g.number()
		for used[n] {
			n = g.number()
		}
		used[n] = true
		t.Rows = append(t.Rows, []string{names[perm[i]], one(g, s.av), one(g, s.bv), strconv.Itoa(n)})
	}
	return t
}

// quantities have one, two and three digits about equally often, so that text order and number order differ in most tables.
var quantities = [...]int{3, 5, 8, 9, 20, 40, 60, 75, 110, 130, 150, 180}

func (g *gen) number() int { return quantities[g.IntN(len(quantities))] }

// long fills a table of 38-45 rows with rising codes.
func (g *gen) long(s schema) Table {
	t := Table{Name: s.table, Columns: []Column{column("code", "text"), column(s.a, "text"), column(s.b, "text")}}
	letter, n := string(rune('A'+g.IntN(26))), 100+g.IntN(400)
	for range 38 + g.IntN(8) {
		n += 1 + g.IntN(9)
		t.Rows = append(t.Rows, []string{letter + strconv.Itoa(n), one(g, s.av), one(g, s.bv)})
	}
	return t
}

// col extracts one column of the rows that match every (column, value) pair.
func (t Table) col(want int, where ...any) []string {
	var out []string
	for _, r := range t.Rows {
		if matches(r, where...) {
			out = append(out, r[want])
		}
	}
	return out
}

func matches(r []string, where ...any) bool {
	for i := 0; i+1 < len(where); i += 2 {
		if r[where[i].(int)] != where[i+1].(string) {
			return false
		}
	}
	return true
}

func numbers(texts []string) []int {
	out := make([]int, len(texts))
	for i, s := range texts {
		out[i], _ = strconv.Atoi(s)
	}
	return out
}

// TableMD5 is the digest of a table's rows, all columns in order, as envs.md 4.4
// takes it: five hex digits per row, sorted, joined by commas, hashed again.
// Cells are texts, so no NULL is skipped. rows must not be empty.
func TableMD5(rows [][]string) string {
	hashes := make([]string, len(rows))
	for i, r := range rows {
		sum := md5.Sum([]byte(strings.Join(r, ",")))
		hashes[i] = hex.EncodeToString(sum[:])[:5]
	}
	slices.Sort(hashes)
	sum := md5.Sum([]byte(strings.Join(hashes, ",")))
	return hex.EncodeToString(sum[:])
}

// visible is how many whole rows of a listing survive the observation cap of
// 800 characters. No value needs escaping.
func visible(rows [][]string) int {
	used := 1
	for i, r := range rows {
		used += len(`(`) + len(strings.Join(r, `', '`)) + len(`''`) + len(`), `)
		if used > 800 {
			return i
		}
	}
	return len(rows)
}
