package harness_test

import (
	"context"
	"strings"
	"testing"

	"harness-s/env"
	"harness-s/env/dbbench"
	"harness-s/env/dbbench/embedded"
	"harness-s/env/harness"
	"harness-s/model/chat"
)

// coder is a tokenizer of single bytes plus the template's literals.
type coder struct{}

var literals = [...]string{chat.IMStart, chat.IMEnd, chat.EndOfText, chat.ThinkOpen, chat.ThinkClose, chat.ToolCallOpen, chat.ToolCallClose, chat.ToolResponseOpen, chat.ToolResponseClose}

func (c coder) Encode(text string) (out []int32) {
next:
	for text != "" {
		for i, l := range literals {
			if rest, ok := strings.CutPrefix(text, l); ok {
				out, text = append(out, int32(256+i)), rest
				continue next
			}
		}
		out, text = append(out, int32(text[0])), text[1:]
	}
	return out
}

func (coder) EncodeOrdinary(text string) []int32 {
	out := make([]int32, len(text))
	for i := range len(text) {
		out[i] = int32(text[i])
	}
	return out
}

func decode(ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		if id < 256 {
			b.WriteByte(byte(id))
		} else {
			b.WriteString(literals[id-256])
		}
	}
	return b.String()
}

func open(t testing.TB, world *dbbench.Env, ref env.TaskRef, spec *harness.Spec, id string) *harness.Episode {
	t.Helper()
	a, err := world.Open(context.Background(), ref, env.OpenOptions{AttemptID: id})
	if err != nil {
		t.Fatal(err)
	}
	e, err := harness.NewEpisode(harness.Config{
		Spec: spec, Attempt: a, Task: ref, Encoder: coder{}, Decode: decode, Renderer: chat.NewRenderer(false), Stop: []int32{257, 258},
		MaxTurns: 6, MaxNew: 600, MaxContext: 20000, Key: harness.RNGKey{Task: ref.ID},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return e
}

func world(t testing.TB, train int) (*dbbench.Env, []env.TaskRef) {
	t.Helper()
	w, err := dbbench.New(dbbench.Options{Source: dbbench.TinyDB, Seed: 3, Train: train, Val: 1, Test: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	refs, err := w.Tasks(context.Background(), env.Train)
	if err != nil {
		t.Fatal(err)
	}
	return w, refs
}

func demo(t testing.TB, w *dbbench.Env, ref env.TaskRef, style string) []string {
	t.Helper()
	demos, err := w.Demos(ref, style)
	if err != nil || len(demos) == 0 {
		t.Fatalf("%s: no %s demo: %v", ref.ID, style, err)
	}
	var turns []string
	for _, d := range demos[0].Turns {
		turns = append(turns, d.Text)
	}
	return turns
}

// The real grader decides: good and recover programs solve their task under the
// original harness, sloppy ones fail with a cause of their family.
func TestTinyDBPrograms(t *testing.T) {
	w, refs := world(t, 300)
	pool, err := harness.StarterPool("dbbench")
	if err != nil {
		t.Fatal(err)
	}
	causes := map[string][]string{}
	for _, f := range embedded.Families() {
		causes[f.Name] = f.Causes
	}
	explained, sloppy := 0, 0
	for _, ref := range refs {
		for _, style := range []string{"good", "sloppy", "recover"} {
			tr, err := harness.RunScripted(context.Background(), open(t, w, ref, pool.Original(), ref.ID+style), demo(t, w, ref, style), coder{})
			if err != nil {
				t.Fatal(err)
			}
			if err := tr.Check(); err != nil {
				t.Fatal(err)
			}
			if tr.Success() != (style != "sloppy") || !tr.Valid() {
				t.Errorf("%s (%s): %s program ends %s: %+v", ref.ID, ref.Group, style, tr.Outcome, tr.Transcript)
			}
			if tr.InitDigest == "" {
				t.Errorf("%s: no digest", ref.ID)
			}
			if style != "sloppy" || len(causes[ref.Group]) == 0 {
				continue
			}
			sloppy++
			for _, c := range tr.Causes {
				if c == causes[ref.Group][0] {
					explained++
				}
			}
		}
	}
	if sloppy == 0 || float64(explained) < 0.9*float64(sloppy) {
		t.Errorf("the rule-based causes name the family's cause in %d of %d sloppy episodes", explained, sloppy)
	}
}

// A known-good solution passes under the original and under every auxiliary.
func TestGoodProgramsPassUnderEveryHarness(t *testing.T) {
	w, refs := world(t, 120)
	pool, err := harness.StarterPool("dbbench")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, ref := range refs {
		if seen[ref.Group]++; seen[ref.Group] > 1 {
			continue
		}
		prompts := map[string]string{}
		for _, spec := range pool.Specs {
			tr, err := harness.RunScripted(context.Background(), open(t, w, ref, spec, ref.ID+spec.ID()), demo(t, w, ref, "good"), coder{})
			if err != nil || !tr.Success() || tr.HookErrors > 0 {
				t.Errorf("%s (%s) under %s: %s, %v: %+v", ref.ID, ref.Group, spec.Name, tr.Outcome, err, tr.Transcript)
			}
			prompts[spec.Name] = decode(tr.Segments[0].IDs)
			again, err := harness.RunScripted(context.Background(), open(t, w, ref, spec, ref.ID+spec.ID()+"b"), demo(t, w, ref, "good"), coder{})
			if err != nil || decode(again.Segments[0].IDs) != prompts[spec.Name] {
				t.Errorf("%s under %s: two replays differ (%v)", ref.ID, spec.Name, err)
			}
		}
	}
	for _, f := range embedded.Families() {
		if seen[f.Name] < 1 {
			t.Errorf("family %s was not covered", f.Name)
		}
	}
}

// For every hard family at least three auxiliaries speak up on the way of the
// sloppy program: in the system prompt, with the question, after the first
// observation, or by refusing a step.
func TestEveryHardFamilyIsTargeted(t *testing.T) {
	w, refs := world(t, 120)
	pool, err := harness.StarterPool("dbbench")
	if err != nil {
		t.Fatal(err)
	}
	hard := map[string]embedded.Family{}
	for _, f := range embedded.Families() {
		if f.Hard {
			hard[f.Name] = f
		}
	}
	for _, ref := range refs {
		f, ok := hard[ref.Group]
		if !ok {
			continue
		}
		delete(hard, ref.Group)
		var speak []string
		base := ""
		for _, spec := range pool.Specs {
			tr, err := harness.RunScripted(context.Background(), open(t, w, ref, spec, ref.ID+"t"+spec.ID()), demo(t, w, ref, "sloppy"), coder{})
			if err != nil {
				t.Fatal(err)
			}
			text := decode(tr.Segments[0].IDs)
			if spec.Original() {
				base = text
			}
			if text == base {
				continue
			}
			for _, c := range spec.Causes {
				if c == f.Causes[0] {
					speak = append(speak, spec.Name)
					break
				}
			}
		}
		t.Logf("%s (%s): %s", f.Name, f.Causes[0], strings.Join(speak, ", "))
		if len(speak) < 3 {
			t.Errorf("family %s: only %v", f.Name, speak)
		}
	}
	if len(hard) > 0 {
		t.Errorf("families without a task: %v", hard)
	}
}
