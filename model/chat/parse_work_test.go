package chat

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// repeated are turns that made earlier parsers read the same text again and again.
func repeated() map[string]string {
	m := map[string]string{}
	for _, unit := range []string{ToolCallClose, ThinkClose, ThinkOpen, ToolCallOpen, functionOpen, functionClose, parameterClose, "\n", " ", "<", "</", "x\n", "x \n<function=f>",
		"<tool_call><function=f><parameter=a></tool_call>", "<tool_call><function=f><parameter=a>x</parameter>y</tool_call>", "<function=f></function>", "<tool_call><function=f></function>",
		"<parameter=a>\n", "x<parameter=a>1</parameter>", "<parameter=a>1</parameter>\n", "<tool_call><function=f><parameter=a></tool_call></parameter><parameter=b>", "</tool_call>\n",
		"</parameter></tool_call>", "</function></tool_call>", "<tool_call>{}</tool_call>", "<tool_call>", "Use <function=x> here. ", "\u00a0", "\xff"} {
		m[unit] = unit
	}
	return m
}

// turns returns texts of about n bytes made of a unit: bare, in a call, in an open value, and with each ending.
func turns(unit string, n int) []string {
	body := strings.Repeat(unit, n/len(unit)+1)
	const open = "<tool_call>\n<function=f>\n<parameter=a>\n"
	return []string{body, "<tool_call>" + body, "<tool_call><function=f>" + body, open + body, open + body + "</parameter>\n</function>\n</tool_call>",
		open + body + "</parameter></tool_call>", "x" + body + "</function></tool_call>", "<tool_call><function=" + body + "></function></tool_call>"}
}

// work parses a text in pieces and returns the parser's own count of bytes looked at and questions answered.
func work(text string, mode Mode, inThink bool, piece int) int {
	p := NewParser(mode, inThink)
	for rest := text; rest != ""; {
		n := min(len(rest), piece)
		p.Push(rest[:n])
		rest = rest[n:]
	}
	p.Finish()
	return p.work
}

// The work per byte has a bound that does not depend on the length of the turn, whatever the turn repeats and however it arrives.
func TestWorkIsLinear(t *testing.T) {
	const perByte = 40
	units := repeated()
	r := rand.New(rand.NewPCG(1, 2))
	var all []string
	for _, l := range literals {
		all = append(all, l)
	}
	all = append(all, "\n", "x", ">", " ", "<parameter=b>", "<function=f>", "</tool_call>x<tool_call>")
	for range 60 {
		var unit string
		for range 2 + r.IntN(4) {
			unit += all[r.IntN(len(all))]
		}
		units[unit] = unit
	}
	var keys strings.Builder // blocks whose values hold the blocks after them
	for i := range 100 {
		fmt.Fprintf(&keys, "<tool_call><function=f><parameter=a%d></tool_call></parameter><parameter=b%d>", i, i)
	}
	units["keys"] = keys.String()
	worst, at := 0.0, ""
	for unit := range units {
		for i, text := range turns(unit, 6_000) {
			for _, mode := range []Mode{Strict, Lenient} {
				for _, piece := range []int{len(text), 3} {
					w := float64(work(text, mode, false, piece)) / float64(len(text))
					if w > worst {
						worst, at = w, fmt.Sprintf("%q in form %d, mode %d, pieces of %d", unit, i, mode, piece)
					}
				}
			}
			if w := float64(work(text, Lenient, true, len(text))) / float64(len(text)); w > worst {
				worst, at = w, fmt.Sprintf("%q in form %d while thinking", unit, i)
			}
		}
	}
	t.Logf("%.1f units of work per byte for %s", worst, at)
	if worst > perByte {
		t.Errorf("more than %d", perByte)
	}
}

func BenchmarkParseTurn(b *testing.B) {
	for _, bc := range []struct{ name, unit string }{{"calls", "<tool_call>\n<function=f>\n<parameter=a>\nselect 1 from t where a < 3\n</parameter>\n</function>\n</tool_call>\n"},
		{"tool_call closers", ToolCallClose}, {"think closers", ThinkClose}, {"newlines", "\n"}, {"open values", "<tool_call><function=f><parameter=a></tool_call>"}} {
		for _, n := range []int{40_000, 400_000} {
			text := strings.Repeat(bc.unit, n/len(bc.unit))
			b.Run(fmt.Sprintf("%s/%d", bc.name, n), func(b *testing.B) {
				b.SetBytes(int64(len(text)))
				for b.Loop() {
					ParseTurn(text, Lenient, false)
				}
			})
		}
	}
}
