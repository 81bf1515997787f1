package harness

import (
	"strings"

	"harness-s/env"
)

// summary condenses an episode's facts into counters: what routers, profiles
// and behaviour reports read (method.md 7.4). It holds no gold.
func (e *Episode) summary() map[string]any {
	s := map[string]any{
		"turns": e.turn, "blocked": e.blocked, "hook_errors": e.state.hookErrs, "committed": e.submits > 0,
		"format_errors": e.facts.int("format_errors"), "cond_words": e.facts.int("cond_words"), "steps_left": e.c.MaxTurns - e.turn,
		"outcome": e.outcome.String(),
	}
	var sql, errs, repeats, dml, dmlRepeats, truncated, afterTrunc, conj, zeroRows, schemaErrs, typeErrs, multi int
	var casts, uncast, schemaFirst, emptyLast, postDML, distinct, counts, ordered, limitOne, answersDiffer bool
	truncOpen := false
	for i, m := range e.facts.steps {
		kind, _ := m["stmt_kind"].(string)
		kind = strings.ToLower(kind)
		isErr := m["error"] == true
		text := strings.Join(words(m), " ")
		if m["is_submit"] == true {
			continue
		}
		sql++
		if isErr {
			errs++
		}
		rep, _ := number(m["repeat_count"])
		if rep > 0 {
			repeats++
		}
		if truncOpen && kind == "select" && rep == 0 {
			afterTrunc++
			truncOpen = false
		}
		if m["truncated"] == true {
			truncated++
			truncOpen = true
		}
		if n, ok := number(m["errno"]); ok {
			switch int(n) {
			case 1054, 1064, 1146:
				schemaErrs++
			case 1292, 1366:
				typeErrs++
			case 1136:
				multi++
			}
		}
		if kind == "show" && i == 0 {
			schemaFirst = true
		}
		if isDML(kind) {
			if !isErr {
				dml++
				if rep > 0 {
					dmlRepeats++
				}
			}
			if n, ok := number(m["affected_rows"]); ok && n == 0 && !isErr {
				zeroRows++
			}
			postDML = false
		} else if kind == "select" {
			postDML = dml > 0
			emptyLast = m["empty_result"] == true || m["null_result"] == true
			c, _ := number(m["where_conjuncts"])
			conj = max(conj, int(c))
			casts = casts || m["sql_casts"] == true
			aggregate := strings.Contains(text, "max(") || strings.Contains(text, "min(") || strings.Contains(text, "sum(") || strings.Contains(text, "avg(")
			uncast = m["uncast_numeric_compare"] == true || m["ordered_text_col_uncast"] == true || aggregate && m["sql_casts"] != true
			counts = strings.Contains(text, "count(")
			distinct = strings.Contains(text, "distinct")
			ordered = strings.Contains(text, "order by")
			limitOne = ordered && strings.HasSuffix(text, "limit 1")
			uncast = uncast || limitOne && m["sql_casts"] != true
		}
		if isDML(kind) {
			c, _ := number(m["where_conjuncts"])
			conj = max(conj, int(c))
		}
	}
	last, _ := e.facts.get("last_select_values")
	if vals, ok := last.([]string); ok && e.submits > 0 {
		answersDiffer = len(e.lastAnswers()) != len(vals)
	}
	for k, v := range map[string]any{
		"sql": sql, "sql_errors": errs, "sql_repeats": repeats, "dml": dml, "dml_repeats": dmlRepeats, "dml_zero_rows": zeroRows,
		"truncated": truncated, "truncation_followed": afterTrunc, "max_conjuncts": conj, "schema_errors": schemaErrs, "type_errors": typeErrs,
		"column_count_errors": multi, "casts": casts, "uncast": uncast, "schema_first": schemaFirst, "empty_last": emptyLast,
		"post_dml_select": postDML, "counts": counts, "distinct": distinct, "limit_one": limitOne, "answers_differ": answersDiffer,
	} {
		s[k] = v
	}
	return s
}

func words(m map[string]any) []string {
	w, _ := m["action_words"].([]string)
	return w
}

// lastAnswers are the answers of the last commit.
func (e *Episode) lastAnswers() []string {
	for i := len(e.facts.steps) - 1; i >= 0; i-- {
		if e.facts.steps[i]["is_submit"] == true {
			text := strings.Join(words(e.facts.steps[i]), " ")
			if text == "" {
				return nil
			}
			return strings.Split(text, "\x00")
		}
	}
	return nil
}

// causes assigns the rule-based D-codes of envs.md 5.3 to a failed episode, in
// table order. s is the summary of the episode.
func causes(s map[string]any) []string {
	n := func(k string) int {
		v, _ := number(s[k])
		return int(v)
	}
	b := func(k string) bool { return s[k] == true }
	var out []string
	for _, c := range [...]struct {
		code string
		hit  bool
	}{
		{"D-SCHEMA", n("schema_errors") >= 2 || n("schema_errors") == 1 && n("sql_errors") == n("sql")},
		{"D-TYPE", b("uncast") || n("type_errors") > 0},
		{"D-SET", b("empty_last") || n("cond_words") >= 2 && n("max_conjuncts") < 2 && n("sql") > 0},
		{"D-AGG", b("counts") && !b("distinct") || b("limit_one")},
		{"D-DML", n("dml") > 0 && (n("dml_repeats") > 0 || n("dml_zero_rows") > 0 || !b("post_dml_select")) || n("column_count_errors") > 0},
		{"D-PROTO", n("format_errors") > 0 || n("truncated") > n("truncation_followed")},
		{"D-DONE", !b("committed") || b("answers_differ") || n("sql") == 0},
	} {
		if c.hit {
			out = append(out, c.code)
		}
	}
	return out
}

// Valid mirrors env.Outcome.Valid for readers of a Trajectory.
func (t *Trajectory) Valid() bool { return t.Outcome != 0 && t.Outcome.Valid() }

// Success reports whether the verifier was satisfied.
func (t *Trajectory) Success() bool { return t.Outcome == env.Solved }
