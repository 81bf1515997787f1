package harness

import (
	"context"
	"strings"
	"testing"

	"harness-s/env"
	"harness-s/model/chat"
)

func TestPredicates(t *testing.T) {
	f := newFacts()
	f.now = map[string]any{
		"n": 3, "f": 2.5, "s": "Full page", "b": true, "list": []string{"a", "b"}, "nums": []int{1, 2},
		"page": map[string]any{"last_full": true}, "seen": map[string]bool{"t": true},
	}
	f.steps = []map[string]any{{"x": 1}, {"x": 2}, {"y": 3}}
	leaf := func(name, op string, v any, scope ...string) Pred {
		p := Pred{F: name, Op: op, V: v}
		if len(scope) > 0 {
			p.Scope = scope[0]
		}
		return p
	}
	no := leaf("n", "eq", 4)
	for name, c := range map[string]struct {
		p    Pred
		want bool
	}{
		"empty":               {Pred{}, true},
		"eq int64":            {leaf("n", "eq", int64(3)), true},
		"eq float":            {leaf("n", "eq", 3.0), true},
		"eq missing":          {leaf("z", "eq", 3), false},
		"ne missing":          {leaf("z", "ne", 3), true},
		"ne":                  {leaf("n", "ne", 3), false},
		"lt":                  {leaf("f", "lt", 3), true},
		"le":                  {leaf("n", "le", 3), true},
		"gt":                  {leaf("n", "gt", 3), false},
		"ge":                  {leaf("n", "ge", 3), true},
		"lt of text":          {leaf("s", "lt", 3), false},
		"in":                  {leaf("n", "in", []any{int64(1), int64(3)}), true},
		"not in":              {leaf("n", "in", []any{int64(1)}), false},
		"in missing":          {leaf("z", "in", []any{int64(1)}), false},
		"contains text":       {leaf("s", "contains", "full"), true},
		"contains list":       {leaf("list", "contains", "b"), true},
		"contains int list":   {leaf("nums", "contains", int64(2)), true},
		"contains missing":    {leaf("z", "contains", "b"), false},
		"contains wrong kind": {leaf("n", "contains", "b"), false},
		"matches":             {leaf("s", "matches", `(?i)^full\b`), true},
		"matches number":      {leaf("n", "matches", `3`), false},
		"exists":              {leaf("b", "exists", true), true},
		"exists missing":      {leaf("z", "exists", true), false},
		"absent":              {leaf("z", "exists", false), true},
		"bool":                {leaf("b", "eq", true), true},
		"bool vs text":        {leaf("b", "eq", "true"), false},
		"dotted":              {leaf("page.last_full", "eq", true), true},
		"dotted bool map":     {leaf("seen.t", "eq", true), true},
		"step scope":          {leaf("y", "eq", 3, "step"), true},
		"step scope misses":   {leaf("x", "eq", 2, "step"), false},
		"last 2":              {leaf("x", "eq", 2, "last:2"), true},
		"last 1":              {leaf("x", "eq", 2, "last:1"), false},
		"last 9":              {leaf("x", "eq", 1, "last:9"), true},
		"all":                 {Pred{All: []Pred{leaf("n", "eq", 3), leaf("b", "eq", true)}}, true},
		"all fails":           {Pred{All: []Pred{leaf("n", "eq", 3), no}}, false},
		"any":                 {Pred{Any: []Pred{no, leaf("b", "eq", true)}}, true},
		"any fails":           {Pred{Any: []Pred{no, no}}, false},
		"not":                 {Pred{Not: &no}, true},
	} {
		test, err := c.p.compile()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := test(f); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	for name, p := range map[string]Pred{
		"two forms": {F: "n", Op: "eq", V: 1, Not: &no}, "operator": leaf("n", "like", 1), "pattern": leaf("n", "matches", "("), "scope": leaf("n", "eq", 1, "last:0"),
		"scope name": leaf("n", "eq", 1, "turn"), "lt text": leaf("n", "lt", "x"), "in scalar": leaf("n", "in", 1), "matches number": leaf("n", "matches", 1),
		"nested": {All: []Pred{leaf("n", "eq", 1, "bad")}},
	} {
		if _, err := p.compile(); err == nil {
			t.Errorf("%s: compiled", name)
		}
	}
}

func TestTemplates(t *testing.T) {
	f := newFacts()
	f.now = map[string]any{"n": 3, "l": []string{"a", "b"}, "e": []string{}, "m": map[string]bool{"x": true}}
	for text, want := range map[string]string{"{n} left": "3 left", "cols {l}": "cols a, b", "{m}": "x", "plain": "plain", "{n}{n}": "33"} {
		tm, err := parseTemplate(text)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := tm.render(f); !ok || got != want {
			t.Errorf("%q: %q, %v", text, got, ok)
		}
	}
	for _, text := range []string{"{e}", "{missing}", "{n} {missing}"} {
		tm, err := parseTemplate(text)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := tm.render(f); ok {
			t.Errorf("%q rendered to %q", text, got)
		}
	}
	for _, text := range []string{"{", "}", "{}", "a {b", "{a b}", "{A}", "x } {n}"} {
		if _, err := parseTemplate(text); err == nil {
			t.Errorf("%q parsed", text)
		}
	}
}

func TestSQLFacts(t *testing.T) {
	for sql, want := range map[string]struct {
		norm, stmt, where string
		conj              int
	}{
		"SELECT  A FROM t\nWHERE b = 'X  and Y' AND c = 1 ORDER BY a LIMIT 1;": {"select a from t where b = 'X  and Y' and c = 1 order by a limit 1", "select", "b = 'X  and Y' and c = 1", 2},
		"update t set a = '1'":     {"update t set a = '1'", "update", "", 0},
		"DESCRIBE `My Table`":      {"describe `My Table`", "show", "", 0},
		"DELETE FROM t WHERE a=1;": {"delete from t where a=1", "delete", "a=1", 1},
		"":                         {"", "", "", 0},
		"'unterminated":            {"'unterminated", "other", "", 0},
	} {
		a := newAction("execute_sql", "", sql, nil)
		if a.norm != want.norm || a.stmt != want.stmt || a.where != want.where || a.conjuncts != want.conj {
			t.Errorf("%q: %q %q %q %d", sql, a.norm, a.stmt, a.where, a.conjuncts)
		}
	}
	if x, y := newAction("execute_sql", "", "SELECT 1 ;", nil), newAction("execute_sql", "", "select\t1", nil); x.hash != y.hash {
		t.Error("case and blanks change the action hash")
	}
	for text, want := range map[string]int{
		"How many ferries have deck low and port Lund?": 2, "What is the port when name is Otter?": 1, "Add to hives: a, b.": 0,
		"Set a to 1 where b is 2 and c is 3 and d is 4.": 3,
	} {
		if got := condWords(text); got != want {
			t.Errorf("condWords(%q) = %d, want %d", text, got, want)
		}
	}
}

func TestReminders(t *testing.T) {
	t.Run("max and cooldown", func(t *testing.T) {
		s := specWith(t, "[[edits.ops]]\nslot = \"reminder\"\ntext = \"AAA\"\nmax = 2\ncooldown = 1\n")
		e := newEpisode(t, s, &fakeEnv{text: "q"}, func(c *Config) { c.MaxTurns = 9 })
		tr := play(t, e, sqlTurn("1"), sqlTurn("2"), sqlTurn("3"), sqlTurn("4"), sqlTurn("5"))
		var shown []int
		for _, r := range tr.Transcript {
			if len(r.Reminders) > 0 {
				shown = append(shown, r.Turn)
			}
		}
		if len(shown) != 2 || shown[0] != 1 || shown[1] != 3 {
			t.Errorf("shown after turns %v, want 1 and 3", shown)
		}
	})
	t.Run("every", func(t *testing.T) {
		s := specWith(t, "[[edits.ops]]\nslot = \"reminder\"\ntext = \"{steps_left} left\"\nevery = 2\n")
		tr := play(t, newEpisode(t, s, &fakeEnv{text: "q"}), sqlTurn("1"), sqlTurn("2"), sqlTurn("3"))
		if len(tr.Transcript[0].Reminders) != 0 || len(tr.Transcript[1].Reminders) != 1 || tr.Transcript[1].Reminders[0] != "4 left" {
			t.Errorf("%+v", tr.Transcript)
		}
	})
	t.Run("token cap", func(t *testing.T) {
		long := strings.Repeat("x", 100)
		op := "[[edits.ops]]\nslot = \"reminder\"\ntext = \"" + long + "\"\n"
		tr := play(t, newEpisode(t, specWith(t, op+op), &fakeEnv{text: "q"}), sqlTurn("1"))
		if got := len(tr.Transcript[0].Reminders); got != 1 {
			t.Errorf("%d reminders of 100 tokens shown, the cap is 160", got)
		}
	})
	t.Run("places and provenance", func(t *testing.T) {
		s := specWith(t, "[[edits.ops]]\nslot = \"reminder\"\ntext = \"II\"\nplace = \"initial\"\n[[edits.ops]]\nslot = \"reminder\"\ntext = \"BB\"\nplace = \"before_obs\"\n[[edits.ops]]\nslot = \"reminder\"\ntext = \"AA\"\nplace = \"after_obs\"\n")
		tr := play(t, newEpisode(t, s, &fakeEnv{text: "q"}), sqlTurn("1"))
		if got, want := kindText(tr.Segments[0], chat.KindHarness), "\nII|BB\n|\nAA"; got != want {
			t.Errorf("harness text %q, want %q", got, want)
		}
		if got := ledgerText(tr.Segments[0]); !strings.Contains(got, "<tool_response>\nBB\n[('Otter',)]\nAA\n</tool_response>") || !strings.Contains(got, "user\nq\nII<|im_end|>") {
			t.Errorf("ledger %q", got)
		}
	})
	t.Run("missing fact", func(t *testing.T) {
		s := specWith(t, "[[edits.ops]]\nslot = \"reminder\"\ntext = \"got {nothing}\"\n")
		tr := play(t, newEpisode(t, s, &fakeEnv{text: "q"}), sqlTurn("1"))
		if len(tr.Transcript[0].Reminders) != 0 {
			t.Errorf("%v", tr.Transcript[0].Reminders)
		}
	})
}

func TestGuards(t *testing.T) {
	guard := func(action string) *Spec {
		return specWith(t, "[[edits.ops]]\nslot = \"guard\"\nid = \"g\"\non = \"dml\"\naction = \""+action+"\"\nblock_max = 2\ntext = \"WAIT\"\n")
	}
	for action, c := range map[string]struct{ blocked, executed int }{"block_once": {1, 2}, "block_max": {2, 1}, "warn": {0, 3}} {
		t.Run(action, func(t *testing.T) {
			f := &fakeEnv{text: "q"}
			e := newEpisode(t, guard(action), f)
			for range 3 {
				if err := deliver(e, sqlTurn("DELETE FROM t")); err != nil {
					t.Fatal(err)
				}
			}
			tr := e.Trajectory()
			if tr.BlockedSteps != c.blocked || len(f.actions) != c.executed || tr.Turns != 3 {
				t.Errorf("%d blocked, %d executed in %d turns, want %d and %d in 3", tr.BlockedSteps, len(f.actions), tr.Turns, c.blocked, c.executed)
			}
			if !strings.Contains(kindText(tr.Segments[0], chat.KindHarness), "WAIT") {
				t.Error("guard text is not in the context as harness text")
			}
		})
	}
	t.Run("selects pass", func(t *testing.T) {
		e := newEpisode(t, guard("block_once"), &fakeEnv{text: "q"})
		if err := deliver(e, sqlTurn("SELECT 1")); err != nil || e.Blocked() {
			t.Errorf("blocked %v, %v", e.Blocked(), err)
		}
	})
}

// deliver plays one turn and runs its actions.
func deliver(e *Episode, turn string) error {
	if _, _, err := e.Next(context.Background()); err != nil {
		return err
	}
	ids := append(byteCoder{}.Encode(turn), imEnd)
	if err := e.Deliver(Completion{Tokens: ids, LogProb: make([]float32, len(ids)), Finish: Stop}); err != nil {
		return err
	}
	_, _, err := e.Next(context.Background())
	return err
}

func TestBudgetReserve(t *testing.T) {
	s := specWith(t, "[[edits.ops]]\nslot = \"budget\"\nop = \"reserve\"\nsteps = 1\nwarn_at = [2, 1]\nrestrict = true\ntext = \"{steps_left} left, commit\"\n")
	f := &fakeEnv{text: "q", verdict: env.Verdict{Success: true, Outcome: env.Solved}}
	e := newEpisode(t, s, f, func(c *Config) { c.MaxTurns = 3 })
	for range 3 {
		if err := deliver(e, sqlTurn("SELECT 1")); err != nil {
			t.Fatal(err)
		}
	}
	tr := e.Trajectory()
	if tr.Outcome != env.StepLimit || len(f.actions) != 2 || tr.BlockedSteps != 1 {
		t.Errorf("outcome %s, %d actions ran, %d blocked", tr.Outcome, len(f.actions), tr.BlockedSteps)
	}
	if tr.Transcript[0].Reminders[0] != "2 left, commit" || tr.Transcript[1].Reminders[0] != "1 left, commit" {
		t.Errorf("%+v", tr.Transcript)
	}
	f = &fakeEnv{text: "q", verdict: env.Verdict{Success: true, Outcome: env.Solved}}
	e = newEpisode(t, s, f, func(c *Config) { c.MaxTurns = 1 })
	if tr := play(t, e, commitTurn(`["a"]`)); tr.Outcome != env.Solved {
		t.Errorf("commit on the reserved step: %s", tr.Outcome)
	}
}

func TestMemory(t *testing.T) {
	s := specWith(t, `
[[edits.ops]]
slot = "memory"
mech = "ledger"
key = "{table}"
value = "{cols}"
title = "Known tables:"
cap_tokens = 60
[[edits.ops]]
slot = "memory"
mech = "notes"
title = "Notes:"
keep_last = 1
[[edits.ops]]
slot = "memory"
mech = "checklist"
title = "Plan:"
`)
	f := &fakeEnv{text: "q", reply: func(n int, a env.Action) (env.Step, error) {
		return env.Step{Obs: "ok", Facts: map[string]any{"table": "t", "cols": []string{"a", "b"}}}, nil
	}}
	e := newEpisode(t, s, f, func(c *Config) { c.MaxNew = 900 })
	tr := play(t, e, "NOTE: first\nNOTE: second\n- [ ] look\n- [x] think\n"+sqlTurn("1"), sqlTurn("2"))
	want := "ok\nKnown tables:\n- t: a, b\nNotes:\n- second\nPlan:\n- [ ] look\n- [x] think\n</tool_response>"
	if got := ledgerText(tr.Segments[0]); !strings.Contains(got, want) {
		t.Errorf("ledger %q lacks %q", got, want)
	}
	if n := len(tr.Transcript[1].Reminders); n != 0 {
		t.Errorf("unchanged memories shown again: %v", tr.Transcript[1].Reminders)
	}
}

func TestObservationOps(t *testing.T) {
	s := specWith(t, `
[[edits.ops]]
slot = "observation"
op = "truncate"
unit = "char"
cap = 10
head = 0.7
notice = "[{cut} hidden]"
[[edits.ops]]
slot = "observation"
op = "footer"
text = "[{rows_returned} rows]"
[[edits.ops]]
slot = "observation"
op = "error_hint"
[[edits.ops.hints]]
match = "^1064"
text = "Check the syntax."
`)
	f := &fakeEnv{text: "q", reply: func(n int, a env.Action) (env.Step, error) {
		if n == 1 {
			return env.Step{Obs: "0123456789abcdef", Facts: map[string]any{"rows_returned": 4}}, nil
		}
		return env.Step{Obs: "1064 (4)", Kind: env.KindToolError}, nil
	}}
	tr := play(t, newEpisode(t, s, f), sqlTurn("1"), sqlTurn("2"))
	got := ledgerText(tr.Segments[0])
	for _, want := range []string{"0123456[6 hidden]def\n[4 rows]\n</tool", "1064 (4)\n[4 rows]\nCheck the syntax.\n</tool"} {
		if !strings.Contains(got, want) {
			t.Errorf("ledger %q lacks %q", got, want)
		}
	}
	tok := truncate("abcdefgh", Op{Unit: "token", Cap: 4, Head: 0.5, Notice: "~"}, byteCoder{}, decodeBytes)
	if got := chat.Text(tok); got != "ab~gh" {
		t.Errorf("token truncation %q", got)
	}
}

func TestParseSlot(t *testing.T) {
	s := specWith(t, "[[edits.ops]]\nslot = \"parse\"\naccept = [\"sql_block\"]\ntext = \"One tool per turn.\"\n")
	f := &fakeEnv{text: "q"}
	tr := play(t, newEpisode(t, s, f), "Look:\n```sql\nSELECT 1\n FROM t\n```", "nothing")
	if len(f.actions) != 1 || string(f.actions[0].Args) != `{"query":"SELECT 1 FROM t"}` {
		t.Errorf("actions %+v", f.actions)
	}
	if got := ledgerText(tr.Segments[0]); !strings.Contains(got, "Internal error: no tool call found. One tool per turn.") {
		t.Errorf("ledger %q", got)
	}
}

func TestCauses(t *testing.T) {
	f := func(obs string, kind env.StepKind, facts map[string]any) func(int, env.Action) (env.Step, error) {
		return func(_ int, a env.Action) (env.Step, error) {
			if a.Tool == "commit_final_answer" {
				return env.Step{Done: true}, nil
			}
			return env.Step{Obs: obs, Kind: kind, Facts: facts}, nil
		}
	}
	for name, c := range map[string]struct {
		text  string
		reply func(int, env.Action) (env.Step, error)
		turns []string
		want  string
	}{
		"uncast max":         {"What is the largest crew?", f("[('97',)]", env.KindOK, nil), []string{sqlTurn("SELECT MAX(crew) FROM f"), commitTurn(`["97"]`)}, "D-TYPE"},
		"dropped condition":  {"How many have a b and c d?", f("[(3,)]", env.KindOK, nil), []string{sqlTurn("SELECT name FROM f WHERE a = 'b'"), commitTurn(`["3"]`)}, "D-SET"},
		"counted rows":       {"How many different a values?", f("[(9,)]", env.KindOK, nil), []string{sqlTurn("SELECT COUNT(a) FROM f"), commitTurn(`["9"]`)}, "D-AGG"},
		"cut listing":        {"What is last?", f("[('a',), [TRUNCATED]", env.KindOK, nil), []string{sqlTurn("SELECT * FROM f"), commitTurn(`["a"]`)}, "D-PROTO"},
		"no commit":          {"What?", f("[('a',)]", env.KindOK, nil), []string{sqlTurn("SELECT a FROM f"), sqlTurn("SELECT b FROM f")}, "D-DONE"},
		"bad name":           {"What?", f("1064 (42000): x", env.KindToolError, nil), []string{sqlTurn("SELECT rank FROM f"), commitTurn(`["a"]`)}, "D-SCHEMA"},
		"unchecked change":   {"Set a.", f("[]", env.KindOK, map[string]any{"affected_rows": 3}), []string{sqlTurn("UPDATE f SET a = '1'"), commitTurn(`["a"]`)}, "D-DML"},
		"committed untested": {"Delete all.", f("", env.KindOK, nil), []string{commitTurn(`["a"]`)}, "D-DONE"},
	} {
		t.Run(name, func(t *testing.T) {
			fe := &fakeEnv{text: c.text, reply: c.reply, verdict: env.Verdict{Outcome: env.Failed}}
			tr := play(t, newEpisode(t, starterPool(t).Original(), fe, func(k *Config) { k.MaxTurns = 2 }), c.turns...)
			if len(tr.Causes) == 0 || !strings.Contains(strings.Join(tr.Causes, ","), c.want) {
				t.Errorf("causes %v (%s), want %s; facts %v", tr.Causes, tr.Outcome, c.want, tr.Facts)
			}
		})
	}
}
