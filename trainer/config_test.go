package trainer

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestDefaultsAndPresetsLoad(t *testing.T) {
	if err := Defaults().Validate(); err != nil {
		t.Fatal(err)
	}
	if len(Presets()) < 2 {
		t.Fatalf("presets: %v", Presets())
	}
	for _, name := range Presets() {
		text, err := Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Load([]Layer{{"preset " + name, text}}, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Preset("nope"); !errors.Is(err, ErrConfig) || !strings.Contains(Hint(err), "demo") {
		t.Errorf("unknown preset: %v, hint %q", err, Hint(err))
	}
}

func TestEveryKeyIsDocumented(t *testing.T) {
	docs := Doc()
	if len(docs) != len(leaves()) {
		t.Fatalf("%d docs for %d keys", len(docs), len(leaves()))
	}
	root := reflect.TypeFor[Config]()
	for i := range root.NumField() {
		if root.Field(i).Tag.Get("doc") == "" || root.Field(i).Tag.Get("toml") == "" {
			t.Errorf("section %s lacks a tag", root.Field(i).Name)
		}
	}
	seen := map[string]bool{}
	for _, l := range leaves() {
		if l.tag.Get("doc") == "" || strings.HasSuffix(l.path, ".") || seen[l.path] {
			t.Errorf("key %q: doc %q", l.path, l.tag.Get("doc"))
		}
		seen[l.path] = true
		for _, tag := range []string{"min", "max"} {
			if s := l.tag.Get(tag); s != "" {
				if x, _ := bound(l, tag, 12345.5); x == 12345.5 {
					t.Errorf("%s: %s tag %q does not parse", l.path, tag, s)
				}
			}
		}
	}
}

func TestLayersAndOrigins(t *testing.T) {
	base := Layer{"preset demo", []byte("[run]\nseed = 5\nsteps = 7\n[grpo]\nclip = [0.1, 0.2]\n")}
	over := Layer{"mine.toml", []byte("[run]\nsteps = 9\n[task.families]\npaged = 2\n")}
	r, err := Load([]Layer{base, over}, []string{"rescue.mode=retry", "rollout.step_timeout=1m30s", "optim.lr=1", "task.families.lookup=0.5"})
	if err != nil {
		t.Fatal(err)
	}
	c := r.Config
	if c.Run.Seed != 5 || c.Run.Steps != 9 || c.GRPO.Clip != [2]float64{0.1, 0.2} || c.Rescue.Mode != "retry" || c.Optim.LR != 1 {
		t.Errorf("got %+v %+v", c.Run, c.Rescue)
	}
	if c.Rollout.StepTimeout.D() != 90*time.Second {
		t.Errorf("step timeout %v", c.Rollout.StepTimeout)
	}
	if diff := cmp.Diff(map[string]float64{"paged": 2, "lookup": 0.5}, c.Task.Families); diff != "" {
		t.Error(diff)
	}
	for path, want := range map[string]string{"run.seed": "preset demo", "run.steps": "mine.toml", "rescue.mode": "--set rescue.mode=retry", "save.keep": "default", "grpo.clip": "preset demo"} {
		if got := r.Origin(path); got != want {
			t.Errorf("origin of %s: %q, want %q", path, got, want)
		}
	}
}

func TestConfigErrors(t *testing.T) {
	tests := []struct {
		name, text string
		sets       []string
		want       []string
	}{
		{"unknown key", "[rollout]\ngroop = 8\n", nil, []string{"f.toml line 2", "rollout.groop", "did you mean rollout.group?", "~~~"}},
		{"unknown section", "[rolout]\ngroup = 8\n", nil, []string{"line 1", "did you mean rollout"}},
		{"key in the wrong section", "[grpo]\nlr = 1e-5\n", nil, []string{"grpo.lr", "did you mean optim.lr?"}},
		{"two unknown keys", "[run]\nsede = 1\nstep = 2\n", nil, []string{"run.seed?", "run.steps?"}},
		{"unknown key by set", "", []string{"run.stepz=3"}, []string{"--set run.stepz=3", "run.steps?"}},
		{"set without value", "", []string{"run.steps"}, []string{"want path=value"}},
		{"syntax", "[run\nseed=1", nil, []string{"f.toml line 1"}},
		{"wrong type", "[run]\nsteps = \"many\"\n", nil, []string{"f.toml line 2"}},
		{"duration without unit", "[rollout]\nstep_timeout = \"60\"\n", nil, []string{"f.toml", "60"}},
		{"short array", "[grpo]\nclip = [0.2]\n", nil, []string{"grpo.clip has 1 values, want 2"}},
		{"long array", "[optim]\nbetas = [0.9, 0.98, 0.1]\n", nil, []string{"optim.betas has 3 values, want 2"}},
		{"enum", "[rescue]\nmode = \"sibling\"\n", nil, []string{`rescue.mode = "sibling"`, "off | retry | siblings", "from f.toml"}},
		{"several at once", "[run]\nsteps = -1\n[grpo]\ndual_clip = 0.5\nkl = 0.1\n[eval]\nk = 5\n", nil,
			[]string{"run.steps = -1", ">= 0", "grpo.dual_clip = 0.5", "0 or above 1", "grpo.kl = 0.1", "no reference weights", "eval.k = 5", "at most eval.attempts (3)"}},
		{"truncated sampling", "[rollout]\ntop_p = 0.9\n", nil, []string{"allow_truncation"}},
		{"min group", "[rescue]\nmin_group = 9\n", nil, []string{"rescue.min_group = 9", "rollout.group (8)"}},
		{"dr_grpo", "[grpo]\nagg = \"dr_grpo\"\n", nil, []string{"grpo.normalize", `"none"`}},
		{"not a number", "[optim]\nlr = nan\n", nil, []string{"optim.lr = nan"}},
		{"bad element", "[grpo]\nclip = [0.2, -1.0]\n", nil, []string{"grpo.clip[1] = -1.0"}},
		{"mask never applied", "[grpo]\nold_logprobs = \"sampler\"\nmismatch = \"mask_geo\"\n", nil, []string{"grpo.old_logprobs"}},
		{"family weight", "[task.families]\npaged = -1\n", nil, []string{"task.families.paged = -1.0"}},
		{"name", "[run]\nname = \"../x\"\n", nil, []string{"run.name"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Load([]Layer{{"f.toml", []byte(tt.text)}}, tt.sets)
			if !errors.Is(err, ErrConfig) {
				t.Fatalf("error %v", err)
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("no %q in:\n%v", w, err)
				}
			}
		})
	}
}

func TestRenderRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := Defaults()
		c.Run.Name = rapid.StringMatching(`[a-z][a-z0-9_-]{0,10}`).Draw(t, "name")
		c.Model.Path = rapid.String().Draw(t, "path")
		c.Run.Seed = rapid.Uint64Max(1<<53-1).Draw(t, "seed")
		c.Optim.LR = rapid.Float64Range(0, 1).Draw(t, "lr")
		c.GRPO.Clip[1] = rapid.Float64Range(0.001, 10).Draw(t, "clip")
		c.Rollout.EpisodeDeadline = Duration(rapid.Int64Range(int64(time.Second), int64(1000*time.Hour)).Draw(t, "deadline"))
		if n := rapid.IntRange(0, 3).Draw(t, "stop"); n > 0 {
			c.Model.Stop = rapid.SliceOfNDistinct(rapid.StringMatching(`.{1,8}`), n, n, rapid.ID).Draw(t, "stops")
		}
		c.Rollout.AllowTruncation = rapid.Bool().Draw(t, "allow")
		if n := rapid.IntRange(0, 3).Draw(t, "families"); n > 0 {
			c.Task.Families = map[string]float64{}
			for i := range n {
				c.Task.Families[rapid.StringMatching(`[a-z]{1,4}`).Draw(t, "family")] = 1 + float64(i)
			}
		}
		for _, text := range [][]byte{c.TOML(), c.Commented()} {
			r, err := Load([]Layer{{"x", text}}, nil)
			if err != nil {
				t.Fatalf("%v\n%s", err, text)
			}
			if diff := cmp.Diff(c, r.Config); diff != "" {
				t.Fatal(diff)
			}
			if !bytes.Equal(r.Config.TOML(), c.TOML()) || r.Config.Digest() != c.Digest() {
				t.Fatal("canonical text changed")
			}
		}
	})
}

func TestDigestIgnoresWhatResultsDoNotDependOn(t *testing.T) {
	a, b := Defaults(), Defaults()
	b.Run.Name, b.Run.Threads, b.Save.Every = "other", 7, 99
	if a.Digest() != b.Digest() {
		t.Error("name, threads or save schedule changed the digest")
	}
	b.Optim.LR *= 2
	if a.Digest() == b.Digest() {
		t.Error("learning rate did not change the digest")
	}
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{5 * time.Minute: "5m", time.Hour: "1h", 90 * time.Minute: "1h30m", 850 * time.Second: "14m10s", 0: "0s", 1500 * time.Millisecond: "1.5s", 10 * time.Second: "10s"} {
		if got := Duration(d).String(); got != want {
			t.Errorf("%v: %q, want %q", time.Duration(d), got, want)
		}
	}
}

func TestEditDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "abc", 3}, {"kitten", "sitting", 3}, {"sede", "seed", 1}, {"abc", "abc", 0}} {
		if got := editDistance(c.a, c.b); got != c.want {
			t.Errorf("%q %q: %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
