package trainer

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"sort"
	"strconv"
	"strings"
)

// Record is everything one step reports. Fields are grouped by area; each leaf
// carries its stable name and meaning in tags, from which Metrics builds the
// registry. A NaN means "does not apply to this step" and is left out of every
// sink. Areas time, perf, mem and queue depend on the machine; all others are
// equal when a run is repeated.
type Record struct {
	Step, Steps int
	Reward      struct {
		Mean float64 `metric:"reward/mean" doc:"mean verifier reward of valid base attempts"`
		Low  float64 `metric:"reward/low" doc:"lower end of the 95 % interval of reward/mean over tasks"`
		High float64 `metric:"reward/high" doc:"upper end of that interval"`
		MA   float64 `metric:"reward/ma20" doc:"mean of reward/mean over the last 20 steps"`
	}
	Pass struct {
		At1 float64 `metric:"pass/at1" doc:"Pass@1 of base attempts on train tasks"`
		At8 float64 `metric:"pass/at8" doc:"share of train tasks with a base success in the group"`
	}
	Group struct {
		Total            float64 `metric:"group/total" doc:"tasks of the step"`
		Live             float64 `metric:"group/live" doc:"groups in the update"`
		Kept             float64 `metric:"group/kept" doc:"groups with a base success"`
		Mixed            float64 `metric:"group/mixed" doc:"kept groups with contrast"`
		AllPass          float64 `metric:"group/allpass" doc:"groups without a failure, dropped"`
		AllFail          float64 `metric:"group/allfail" doc:"groups whose base attempts all failed"`
		Incomplete       float64 `metric:"group/incomplete" doc:"groups with too few valid attempts, dropped"`
		Rescued          float64 `metric:"group/rescued" doc:"all-fail groups whose replacement has a success"`
		RescueLive       float64 `metric:"group/rescue_live" doc:"rescued groups in the update"`
		StillAllFail     float64 `metric:"group/still_allfail" doc:"all-fail groups whose replacement failed too"`
		RescueIncomplete float64 `metric:"group/rescue_incomplete" doc:"replacement groups with too few valid attempts"`
		Dropped          float64 `metric:"group/dropped" doc:"groups not in the update, for any reason"`
		ContrastLost     float64 `metric:"group/contrast_lost" doc:"groups dropped because a mask removed their contrast"`
		EmptySteps       float64 `metric:"group/empty_steps" doc:"steps so far without any live group"`
	}
	Rescue struct {
		Groups   float64 `metric:"rescue/groups" doc:"groups a rescue was made for"`
		Rate     float64 `metric:"rescue/rate" doc:"the same as a share of the step's groups"`
		Success  float64 `metric:"rescue/success" doc:"share of rescues with at least one success"`
		Attempts float64 `metric:"rescue/attempts" doc:"rescue attempts made"`
		ExtraPct float64 `metric:"rescue/extra_rollouts_pct" doc:"100 x rescue attempts / base attempts, this step"`
		RunPct   float64 `metric:"rescue/extra_rollouts_run_pct" doc:"the same over the run so far"`
	}
	Router struct {
		Top1        float64 `metric:"router/top1_success" doc:"share of rescues whose first choice succeeded"`
		Agreement   float64 `metric:"router/agreement" doc:"Kendall's W of the votes, 1 with a single ranker"`
		EvidenceAge float64 `metric:"router/evidence_age" doc:"steps since the evidence version was built"`
		Version     float64 `metric:"router/evidence_version" doc:"evidence version used"`
		Calls       float64 `metric:"router/calls" doc:"decisions made"`
	}
	Outcome struct {
		Infra        float64 `metric:"outcome/infra" doc:"void attempts: infrastructure"`
		Timeout      float64 `metric:"outcome/timeout" doc:"valid failures by deadline"`
		HarnessFault float64 `metric:"outcome/harness_fault" doc:"void attempts: harness faults"`
		Retries      float64 `metric:"outcome/retries" doc:"void attempts run again"`
	}
	Tokens struct {
		Prompt  float64 `metric:"tokens/prompt" doc:"template, system and task tokens"`
		Policy  float64 `metric:"tokens/policy" doc:"sampled tokens"`
		Tool    float64 `metric:"tokens/tool" doc:"tool result tokens"`
		Harness float64 `metric:"tokens/harness" doc:"tokens added by harnesses"`
		Trained float64 `metric:"tokens/trained" doc:"live tokens of the update"`
	}
	Turns struct {
		Mean float64 `metric:"turns/mean" doc:"turns per episode"`
	}
	Trunc struct {
		Pct float64 `metric:"trunc/pct" doc:"percent of attempts cut by a budget"`
	}
	Explore struct {
		FirstActions float64 `metric:"explore/first_actions" doc:"distinct first actions per group"`
		Sequences    float64 `metric:"explore/sequences" doc:"distinct action sequences per group"`
		EverSolved   float64 `metric:"explore/ever_solved" doc:"train tasks solved at least once so far"`
		OneHarness   float64 `metric:"explore/one_harness" doc:"share of solved tasks solved under a single harness only"`
	}
	Loss struct {
		PG float64 `metric:"loss/pg" doc:"policy loss; near 0 is normal: advantages sum to 0 inside each group"`
	}
	Adv struct {
		NonZero float64 `metric:"adv/nonzero" doc:"trajectories with an advantage other than 0"`
		Total   float64 `metric:"adv/total" doc:"valid trajectories of the step's final groups"`
	}
	Grad struct {
		Norm float64 `metric:"grad/norm" doc:"global L2 norm before clipping"`
	}
	Clip struct {
		Low  float64 `metric:"clip/low" doc:"share of live tokens cut by the lower bound"`
		High float64 `metric:"clip/high" doc:"share of live tokens cut by the upper bound"`
		Dual float64 `metric:"clip/dual" doc:"share of live tokens bounded by the dual clip"`
	}
	Entropy struct {
		Mean float64 `metric:"entropy/mean" doc:"mean entropy of live tokens, nats"`
	}
	KL struct {
		Old float64 `metric:"kl/old" doc:"k3 of the current policy against the one before the step, nats per token"`
	}
	Gap struct {
		Mean float64 `metric:"gap/mean" doc:"mean |trainer - sampler log-prob|, nats"`
		P99  float64 `metric:"gap/p99" doc:"99th percentile of it"`
		Max  float64 `metric:"gap/max" doc:"largest of it"`
		Corr float64 `metric:"gap/corr" doc:"Pearson correlation of the two log-prob vectors"`
		ESS  float64 `metric:"gap/ess" doc:"effective sample size of the importance weights, share"`
	}
	Optim struct {
		LR float64 `metric:"optim/lr" doc:"learning rate of the step"`
	}
	Eval struct {
		Pass1 float64 `metric:"eval/pass1" doc:"Pass@1 on the evaluation split, original harness"`
		PassK float64 `metric:"eval/passk" doc:"Pass@k on the evaluation split, original harness"`
	}
	Time struct {
		Total  float64 `metric:"time/total" doc:"seconds of the step"`
		Gen    float64 `metric:"time/gen" doc:"seconds of sampling"`
		Env    float64 `metric:"time/env" doc:"seconds waiting for environments alone"`
		Rescue float64 `metric:"time/rescue" doc:"seconds with only rescue attempts left"`
		Update float64 `metric:"time/update" doc:"seconds of forward, backward and optimiser"`
		Ckpt   float64 `metric:"time/ckpt" doc:"seconds the last checkpoint before this record took"`
		Eval   float64 `metric:"time/eval" doc:"seconds of evaluation"`
	}
	Queue struct {
		Attempt float64 `metric:"queue/attempt" doc:"mean waiting base attempts"`
		Rescue  float64 `metric:"queue/rescue" doc:"mean waiting rescue attempts"`
	}
	Perf struct {
		Decode float64 `metric:"perf/tok_s_decode" doc:"sampled tokens per second of sampling"`
		Train  float64 `metric:"perf/tok_s_train" doc:"packed tokens per second of the update"`
		MFU    float64 `metric:"perf/mfu" doc:"model FLOPs utilisation of the update, share; absent without a measured peak"`
	}
	Mem struct {
		Peak float64 `metric:"mem/peak" doc:"peak device bytes"`
		RSS  float64 `metric:"mem/rss" doc:"peak resident bytes of the process"`
		KV   float64 `metric:"mem/kv" doc:"key-value pages used at the peak, share"`
	}
	// Harness holds per-harness counts; names are harness/<id>/picked, /success,
	// /fault.
	Harness map[string]HarnessCount
	// Masked holds tokens removed by each configured mask: mask/<name>/tokens.
	Masked map[string]int
}

// HarnessCount is one harness in one step.
type HarnessCount struct{ Picked, Success, Fault int }

// NewRecord returns a record whose every metric is absent (NaN).
func NewRecord(step, steps int) *Record {
	r := &Record{Step: step, Steps: steps}
	r.each(func(_ reflect.StructField, v reflect.Value) { v.SetFloat(math.NaN()) })
	return r
}

// each visits the metric leaves in declaration order.
func (r *Record) each(visit func(reflect.StructField, reflect.Value)) {
	v := reflect.ValueOf(r).Elem()
	for i := range v.NumField() {
		if area := v.Field(i); area.Kind() == reflect.Struct {
			for j := range area.NumField() {
				visit(area.Type().Field(j), area.Field(j))
			}
		}
	}
}

// Value is one named number.
type Value struct {
	Name string
	V    float64
}

// Values returns the present metrics in the registry's order, then the
// per-harness and per-mask ones sorted by name.
func (r *Record) Values() []Value {
	var vs []Value
	r.each(func(f reflect.StructField, v reflect.Value) {
		if x := v.Float(); !math.IsNaN(x) {
			vs = append(vs, Value{f.Tag.Get("metric"), x})
		}
	})
	n := len(vs)
	for id, c := range r.Harness {
		vs = append(vs, Value{"harness/" + id + "/picked", float64(c.Picked)},
			Value{"harness/" + id + "/success", float64(c.Success)}, Value{"harness/" + id + "/fault", float64(c.Fault)})
	}
	for m, c := range r.Masked {
		vs = append(vs, Value{"mask/" + m + "/tokens", float64(c)})
	}
	sort.Slice(vs[n:], func(i, j int) bool { return vs[n+i].Name < vs[n+j].Name })
	return vs
}

// MetricDoc describes one metric name.
type MetricDoc struct {
	Name string `json:"name"`
	Doc  string `json:"doc"`
	Wall bool   `json:"machine_dependent"` // not reproducible across runs
}

// Metrics lists every metric name with its meaning.
func Metrics() []MetricDoc {
	var ds []MetricDoc
	new(Record).each(func(f reflect.StructField, _ reflect.Value) {
		name := f.Tag.Get("metric")
		ds = append(ds, MetricDoc{name, f.Tag.Get("doc"), MachineDependent(name)})
	})
	return append(ds,
		MetricDoc{"harness/<id>/picked", "attempts made under the auxiliary", false},
		MetricDoc{"harness/<id>/success", "successes among them", false},
		MetricDoc{"harness/<id>/fault", "harness faults among them", false},
		MetricDoc{"mask/<name>/tokens", "tokens removed by a mismatch mask", false})
}

// MachineDependent reports whether a metric differs between repetitions of a run.
func MachineDependent(name string) bool {
	area, _, _ := strings.Cut(name, "/")
	switch area {
	case "time", "perf", "mem", "queue":
		return true
	}
	return false
}

// recordSchema is the version inside every metrics.jsonl line.
const recordSchema = 1

// MarshalJSON writes {"schema":1,"step":N,"steps":M,"area/name":value,...}.
// Infinities are written as strings, because JSON has none.
func (r *Record) MarshalJSON() ([]byte, error) {
	var b strings.Builder
	fmt.Fprintf(&b, `{"schema":%d,"step":%d,"steps":%d`, recordSchema, r.Step, r.Steps)
	for _, v := range r.Values() {
		name, err := json.Marshal(v.Name)
		if err != nil {
			return nil, fmt.Errorf("encode metric name: %w", err)
		}
		b.WriteByte(',')
		b.Write(name)
		b.WriteByte(':')
		if math.IsInf(v.V, 0) {
			fmt.Fprintf(&b, `"%v"`, v.V)
		} else {
			b.WriteString(strconv.FormatFloat(v.V, 'g', -1, 64))
		}
	}
	b.WriteByte('}')
	return []byte(b.String()), nil
}

// ParseRecord reads a metrics.jsonl line back as step and values by name.
func ParseRecord(line []byte) (step int, values map[string]float64, err error) {
	var raw map[string]any
	if err := json.Unmarshal(line, &raw); err != nil {
		return 0, nil, fmt.Errorf("parse metrics line: %w", err)
	}
	if s, ok := raw["schema"].(float64); !ok || s != recordSchema {
		return 0, nil, fmt.Errorf("parse metrics line: schema %v, this program reads %d", raw["schema"], recordSchema)
	}
	values = map[string]float64{}
	for k, v := range raw {
		switch x := v.(type) {
		case float64:
			values[k] = x
		case string:
			if f, err := strconv.ParseFloat(x, 64); err == nil {
				values[k] = f
			}
		}
	}
	step = int(values["step"])
	for _, k := range []string{"schema", "step", "steps"} {
		delete(values, k)
	}
	return step, values, nil
}

// Sink receives one record per step. Write is called by one goroutine; when it returns an error that wraps ErrNoSpace nothing was written
// and the caller may try again.
type Sink interface {
	Write(*Record) error
	Close() error
}

// JSONLSink appends records to a.
func JSONLSink(a *Appender) Sink { return jsonlSink{a} }

type jsonlSink struct{ a *Appender }

func (s jsonlSink) Write(r *Record) error { return s.a.Write(r) }
func (s jsonlSink) Close() error          { return s.a.Close() }

// ConsoleSink writes one line per step to w (design.md 13); w stays open. A reader that went away costs lines, not the run.
func ConsoleSink(w io.Writer) Sink { return consoleSink{w} }

type consoleSink struct{ w io.Writer }

func (s consoleSink) Write(r *Record) error {
	fmt.Fprintln(s.w, r.Line())
	return nil
}
func (s consoleSink) Close() error { return nil }

// Line is the step line of design.md 13. Numbers that do not apply are left out.
func (r *Record) Line() string {
	var b strings.Builder
	w := len(strconv.Itoa(r.Steps))
	fmt.Fprintf(&b, "step %*d/%d", w, r.Step, r.Steps)
	add := func(name string, v float64, format func(float64) string) {
		if !math.IsNaN(v) {
			b.WriteString("  " + name + format(v))
		}
	}
	whole := func(v float64) string { return strconv.FormatFloat(v, 'f', 0, 64) }
	add("reward ", r.Reward.Mean, frac)
	add("live ", r.Group.Live, func(v float64) string { return whole(v) + "/" + whole(r.Group.Total) })
	add("pass ", r.Group.AllPass, whole)
	// What stayed all-fail: rescued groups moved to live or pass, incomplete ones to void.
	add("fail ", r.Group.AllFail-orZero(r.Group.Rescued)-orZero(r.Group.RescueIncomplete), whole)
	add("resc ", r.Rescue.Groups, func(v float64) string { return whole(v) + "→" + whole(orZero(r.Group.Rescued)) })
	add("void ", nanIfZero(orZero(r.Group.Incomplete)+orZero(r.Group.RescueIncomplete)), whole)
	add("adv≠0 ", r.Adv.NonZero, func(v float64) string { return whole(v) + "/" + whole(r.Adv.Total) })
	add("tok ", r.Tokens.Trained, count3)
	add("|g| ", r.Grad.Norm, frac)
	add("gap ", r.Gap.Max, tiny)
	add("ent ", r.Entropy.Mean, frac)
	add("kl ", r.KL.Old, tiny)
	add("lr ", r.Optim.LR, tiny)
	if !math.IsNaN(r.Time.Total) {
		fmt.Fprintf(&b, "  %.1fs", r.Time.Total)
		for _, p := range []Value{{"gen", r.Time.Gen}, {"env", r.Time.Env}, {"resc", r.Time.Rescue}, {"upd", r.Time.Update}} {
			if !math.IsNaN(p.V) {
				fmt.Fprintf(&b, " %s%s", p.Name, secs(p.V))
			}
		}
	}
	add("", r.Perf.Decode, func(v float64) string { return count3(v) + " tok/s" })
	add("mfu ", r.Perf.MFU, func(v float64) string { return whole(100*v) + "%" })
	add("", r.Mem.Peak, gib)
	return b.String()
}

func orZero(v float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return v
}

func nanIfZero(v float64) float64 {
	if v == 0 {
		return math.NaN()
	}
	return v
}

// frac shows two decimals without the leading zero: .42, 1.20.
func frac(v float64) string {
	s := strconv.FormatFloat(v, 'f', 2, 64)
	if rest, ok := strings.CutPrefix(s, "0."); ok {
		return "." + rest
	}
	if rest, ok := strings.CutPrefix(s, "-0."); ok {
		return "-." + rest
	}
	return s
}

// tiny shows one or two digits and an exponent: 3e-4, 1.2e-4, 0.
func tiny(v float64) string {
	if v == 0 {
		return "0"
	}
	s := strconv.FormatFloat(v, 'e', 1, 64)
	m, e, _ := strings.Cut(s, "e")
	x, err := strconv.Atoi(e)
	if err != nil {
		return s // Inf and NaN have no exponent
	}
	return strings.TrimSuffix(m, ".0") + "e" + strconv.Itoa(x)
}

// count3 shows a count with a suffix: 41.2k, 5.1M.
func count3(v float64) string {
	switch {
	case v >= 1e6:
		return strconv.FormatFloat(v/1e6, 'f', 1, 64) + "M"
	case v >= 1e3:
		return strconv.FormatFloat(v/1e3, 'f', 1, 64) + "k"
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

// secs shows seconds, with a decimal below 10.
func secs(v float64) string {
	if v < 10 {
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

func gib(v float64) string {
	if v < 10<<30 {
		return strconv.FormatFloat(v/(1<<20), 'f', 0, 64) + "MiB"
	}
	return strconv.FormatFloat(v/(1<<30), 'f', 0, 64) + "GiB"
}
