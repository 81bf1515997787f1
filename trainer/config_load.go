package trainer

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"path"
	"reflect"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"harness-s/kernels"
)

// Layer is one configuration text, later ones win. Name is shown as the origin of
// its values: "preset demo" or a file name.
type Layer struct {
	Name string
	Text []byte
}

// Resolved is a validated configuration and where each value came from.
type Resolved struct {
	Config Config
	origin map[string]string
}

// Origin names the layer that set a key last: "default", a layer's name, or
// "--set".
func (r *Resolved) Origin(path string) string {
	if o, ok := r.origin[path]; ok {
		return o
	}
	return "default"
}

// Load applies layers and then path=value settings to the defaults and validates
// the result. Every problem found is in the error, which wraps ErrConfig.
func Load(layers []Layer, sets []string) (*Resolved, error) {
	r := &Resolved{Config: Defaults(), origin: map[string]string{}}
	var errs []error
	for _, l := range layers {
		errs = append(errs, r.apply(l.Name, l.Text)...)
	}
	for _, s := range sets {
		text, err := setText(s)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, r.apply("--set "+s, []byte(text))...)
	}
	if len(r.Config.Task.Families) == 0 {
		r.Config.Task.Families = nil
	}
	if len(r.Config.Model.Stop) == 0 {
		r.Config.Model.Stop = nil
	}
	errs = append(errs, r.validate()...)
	if len(errs) > 0 {
		return nil, &Error{Op: "load configuration", Err: fmt.Errorf("%w\n%w", ErrConfig, errors.Join(errs...)),
			Hint: "hs config doc lists every key with its range"}
	}
	return r, nil
}

// apply decodes one layer over the configuration.
func (r *Resolved) apply(name string, text []byte) []error {
	var flat map[string]any
	if err := toml.Unmarshal(text, &flat); err != nil {
		return []error{decodeError(name, err)}
	}
	var errs []error
	for _, key := range flatten("", flat) {
		if leaf, ok := findLeaf(key.path); ok && leaf.typ.Kind() == reflect.Array {
			if list, ok := key.value.([]any); ok && len(list) != leaf.typ.Len() {
				errs = append(errs, fmt.Errorf("%s: %s has %d values, want %d", name, key.path, len(list), leaf.typ.Len()))
			}
		}
		r.origin[key.path] = name
	}
	d := toml.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&r.Config); err != nil {
		errs = append(errs, decodeError(name, err))
	}
	return errs
}

// decodeError shows line and underline of every problem, and the nearest key for
// keys that do not exist.
func decodeError(name string, err error) error {
	var missing *toml.StrictMissingError
	if errors.As(err, &missing) {
		var errs []error
		for _, e := range missing.Errors {
			key := strings.Join(e.Key(), ".")
			row, _ := e.Position()
			msg := fmt.Sprintf("%s line %d: unknown key %s", name, row, key)
			if near := nearest(key); near != "" {
				msg += ", did you mean " + near + "?"
			}
			errs = append(errs, fmt.Errorf("%s\n%s", msg, e.String()))
		}
		return errors.Join(errs...)
	}
	var dec *toml.DecodeError
	if errors.As(err, &dec) {
		row, col := dec.Position()
		return fmt.Errorf("%s line %d column %d: %w\n%s", name, row, col, err, dec.String())
	}
	return fmt.Errorf("%s: %w", name, err)
}

// setText turns path=value into TOML; text values need no quotes.
func setText(s string) (string, error) {
	key, value, ok := strings.Cut(s, "=")
	key, value = strings.TrimSpace(key), strings.TrimSpace(value)
	if !ok || key == "" {
		return "", fmt.Errorf("--set %s: want path=value", s)
	}
	for _, part := range strings.Split(key, ".") {
		if part == "" || strings.ContainsAny(part, " \t\n\"'[]{}#=") {
			return "", fmt.Errorf("--set %s: %q is not a key", s, key)
		}
	}
	if leaf, ok := findLeaf(key); ok && isText(leaf.typ) && !strings.HasPrefix(value, `"`) && !strings.HasPrefix(value, "'") {
		value = quote(value)
	}
	return key + " = " + value + "\n", nil
}

type flatKey struct {
	path  string
	value any
}

// flatten lists the leaves of a decoded document with lower-cased paths, sorted;
// tables below a known leaf (a map) belong to it.
func flatten(prefix string, m map[string]any) []flatKey {
	var out []flatKey
	for k, v := range m {
		p := strings.TrimPrefix(prefix+"."+strings.ToLower(k), ".")
		sub, isTable := v.(map[string]any)
		if _, known := findLeaf(p); isTable && !known {
			out = append(out, flatten(p, sub)...)
		} else {
			out = append(out, flatKey{p, v})
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].path < out[j].path })
	return out
}

// leaf is one key of the tree.
type leaf struct {
	path  string
	tag   reflect.StructTag
	typ   reflect.Type
	index []int
}

// leaves lists every key in declaration order.
func leaves() []leaf {
	var out []leaf
	root := reflect.TypeFor[Config]()
	for i := range root.NumField() {
		sec := root.Field(i)
		for j := range sec.Type.NumField() {
			f := sec.Type.Field(j)
			out = append(out, leaf{sec.Tag.Get("toml") + "." + f.Tag.Get("toml"), f.Tag, f.Type, []int{i, j}})
		}
	}
	return out
}

func findLeaf(path string) (leaf, bool) {
	section, key, _ := strings.Cut(path, ".")
	root := reflect.TypeFor[Config]()
	for i := range root.NumField() {
		sec := root.Field(i)
		if sec.Tag.Get("toml") != section {
			continue
		}
		for j := range sec.Type.NumField() {
			if f := sec.Type.Field(j); f.Tag.Get("toml") == key {
				return leaf{path, f.Tag, f.Type, []int{i, j}}, true
			}
		}
	}
	return leaf{}, false
}

func isText(t reflect.Type) bool {
	return t.Kind() == reflect.String || t.Implements(reflect.TypeFor[encoding.TextMarshaler]())
}

// nearest returns the known key closest to an unknown one, or "". Distance counts
// edits of the whole path, or of the last element when the section is right.
func nearest(key string) string {
	best, score := "", 1+len(key)/2
	consider := func(known string) {
		d := editDistance(strings.ToLower(key), known)
		if last := known[strings.LastIndexByte(known, '.')+1:]; !strings.Contains(key, ".") || strings.HasSuffix(key, "."+last) {
			d = min(d, 1+editDistance(strings.ToLower(key[strings.LastIndexByte(key, '.')+1:]), last))
		}
		if d < score {
			best, score = known, d
		}
	}
	seen := map[string]bool{}
	for _, l := range leaves() {
		sec, _, _ := strings.Cut(l.path, ".")
		if !seen[sec] {
			seen[sec] = true
			consider(sec)
		}
		consider(l.path)
	}
	return best
}

// editDistance is Levenshtein's, with a swap of neighbours as one edit.
func editDistance(a, b string) int {
	prev2, prev := []int(nil), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row := make([]int, len(b)+1)
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(prev[j]+1, row[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], prev2[j-2]+1)
			}
		}
		prev2, prev = prev, row
	}
	return prev[len(b)]
}

// Validate checks ranges and combinations and reports every problem.
func (c Config) Validate() error {
	r := &Resolved{Config: c}
	if errs := r.validate(); len(errs) > 0 {
		return &Error{Op: "check configuration", Err: fmt.Errorf("%w\n%w", ErrConfig, errors.Join(errs...)), Hint: "hs config doc lists every key with its range"}
	}
	return nil
}

func (r *Resolved) validate() []error {
	var errs []error
	bad := func(path, value, allowed string) {
		from := ""
		if o, ok := r.origin[path]; ok {
			from = " (from " + o + ")"
		}
		errs = append(errs, fmt.Errorf("%s = %s%s: allowed %s", path, value, from, allowed))
	}
	v := reflect.ValueOf(r.Config)
	for _, l := range leaves() {
		checkRange(l, v.FieldByIndex(l.index), bad)
	}
	r.Config.crossCheck(bad)
	return errs
}

// checkRange applies the enum, min and max tags to a value, element by element.
func checkRange(l leaf, v reflect.Value, bad func(path, value, allowed string)) {
	if v.Kind() == reflect.Array {
		for i := range v.Len() {
			e := l
			e.path = fmt.Sprintf("%s[%d]", l.path, i)
			checkRange(e, v.Index(i), bad)
		}
		return
	}
	if enum := l.tag.Get("enum"); enum != "" {
		for _, word := range strings.Split(enum, "|") {
			if v.String() == word {
				return
			}
		}
		bad(l.path, strconv.Quote(v.String()), strings.ReplaceAll(enum, "|", " | "))
		return
	}
	x := 0.0
	switch v.Kind() {
	case reflect.Int, reflect.Int64:
		x = float64(v.Int())
	case reflect.Uint64:
		x = float64(v.Uint())
	case reflect.Float64:
		x = v.Float()
	default:
		return
	}
	lo, openLo := bound(l, "min", math.Inf(-1))
	hi, openHi := bound(l, "max", math.Inf(1))
	if math.IsNaN(x) || math.IsInf(x, 0) || x < lo || x > hi || openLo && x == lo || openHi && x == hi {
		bad(l.path, renderValue(v), rangeText(l.tag))
	}
}

// bound reads a min or max tag; durations are compared in nanoseconds.
func bound(l leaf, tag string, absent float64) (x float64, open bool) {
	s := l.tag.Get(tag)
	if s == "" {
		return absent, false
	}
	open = s[0] == '>' || s[0] == '<'
	s = strings.TrimLeft(s, "<>")
	if d, err := time.ParseDuration(s); err == nil && l.typ == reflect.TypeFor[Duration]() {
		return float64(d), open
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return absent, false // a test checks that every tag parses
	}
	return f, open
}

// rangeText renders the tags for people: "1..64", "> 0 .. 10", "a | b", "any".
func rangeText(t reflect.StructTag) string {
	if e := t.Get("enum"); e != "" {
		return strings.ReplaceAll(e, "|", " | ")
	}
	lo, hi := t.Get("min"), t.Get("max")
	switch {
	case lo == "" && hi == "":
		return "any"
	case hi == "" && lo[0] == '>':
		return lo
	case hi == "":
		return ">= " + lo
	case lo == "" && hi[0] == '<':
		return hi
	case lo == "":
		return "<= " + hi
	}
	return lo + " .. " + hi
}

// crossCheck holds the rules between keys, and values this version refuses.
func (c *Config) crossCheck(bad func(path, value, allowed string)) {
	if n := c.Run.Name; n == "" || n != path.Base(n) || strings.HasPrefix(n, ".") || strings.ContainsAny(n, "\\ \t\n") {
		bad("run.name", strconv.Quote(n), "a directory name without spaces, not starting with a dot")
	}
	if len(c.LoRA.Targets) == 0 || slices.Contains(c.LoRA.Targets, "") {
		bad("lora.targets", renderValue(reflect.ValueOf(c.LoRA.Targets)), "names of linear layers, or all-linear")
	}
	if c.Task.Env == "" {
		bad("task.env", `""`, "the name of an environment, see hs env ls")
	}
	total := 0.0
	for _, f := range sortedKeys(c.Task.Families) {
		w := c.Task.Families[f]
		if !(w >= 0) || math.IsInf(w, 0) {
			bad("task.families."+f, number(w), ">= 0")
		}
		total += w
	}
	if len(c.Task.Families) > 0 && total == 0 {
		bad("task.families", "all 0", "at least one weight above 0")
	}
	if (c.Rollout.TopP < 1 || c.Rollout.TopK > 0) && !c.Rollout.AllowTruncation {
		bad("rollout.top_p, rollout.top_k", number(c.Rollout.TopP)+", "+strconv.Itoa(c.Rollout.TopK), "1 and 0, unless rollout.allow_truncation = true")
	}
	if c.Rollout.MaxNew >= c.Model.MaxLen {
		bad("rollout.max_new", strconv.Itoa(c.Rollout.MaxNew), fmt.Sprintf("below model.max_len (%d)", c.Model.MaxLen))
	}
	for i, s := range c.Model.Stop {
		if s == "" || slices.Index(c.Model.Stop, s) < i {
			bad(fmt.Sprintf("model.stop[%d]", i), strconv.Quote(s), "tokens or ids, each once")
		}
	}
	if n := c.Model.MicroRows; n > 0 && n < c.Model.MaxLen {
		bad("model.micro_rows", strconv.Itoa(n), fmt.Sprintf("0 or at least model.max_len (%d): an episode is trained in one piece", c.Model.MaxLen))
	}
	if c.Optim.Master == "fp32" && c.DType() == kernels.BF16 {
		bad("optim.master", `"fp32"`, `hilo or auto with bfloat16 weights, whose lower halves it keeps; or --set model.dtype="float32"`)
	}
	if kv := c.Rollout.KVTokens; kv > 0 && kv < c.Model.MaxLen {
		bad("rollout.kv_tokens", strconv.Itoa(kv), fmt.Sprintf("0 or at least model.max_len (%d)", c.Model.MaxLen))
	}
	if c.Rescue.MinGroup > min(c.Rollout.Group, c.Rescue.Attempts) {
		bad("rescue.min_group", strconv.Itoa(c.Rescue.MinGroup), fmt.Sprintf("at most rollout.group (%d) and rescue.attempts (%d)", c.Rollout.Group, c.Rescue.Attempts))
	}
	for _, n := range []struct {
		path string
		v    int
		used bool
	}{{"router.evidence_tasks", c.Router.EvidenceTasks, true}, {"router.recalibrate_tasks", c.Router.RecalibrateTasks, c.Router.RecalibrateEvery > 0}} {
		if n.used && n.v > c.Task.Val {
			bad(n.path, strconv.Itoa(n.v), fmt.Sprintf("at most task.val (%d)", c.Task.Val))
		}
	}
	c.GRPO.crossCheck(bad)
	if c.Eval.K > c.Eval.Attempts {
		bad("eval.k", strconv.Itoa(c.Eval.K), fmt.Sprintf("at most eval.attempts (%d)", c.Eval.Attempts))
	}
	size := c.Task.Val
	if c.Eval.Split == "test" {
		size = c.Task.Test
	}
	if c.Eval.Tasks > size {
		bad("eval.tasks", strconv.Itoa(c.Eval.Tasks), fmt.Sprintf("at most task.%s (%d)", c.Eval.Split, size))
	}
}

func (g *GRPOConfig) crossCheck(bad func(path, value, allowed string)) {
	if g.KL != 0 {
		bad("grpo.kl", number(g.KL), "0: this version loads no reference weights")
	}
	if g.LossContext == "stripped" {
		bad("grpo.loss_context", `"stripped"`, `"own": this version does not re-render trajectories`)
	}
	if g.DualClip != 0 && g.DualClip <= 1 {
		bad("grpo.dual_clip", number(g.DualClip), "0 or above 1")
	}
	if g.Clip[0] >= 1 {
		bad("grpo.clip[0]", number(g.Clip[0]), "below 1")
	}
	if g.GSPOClip[0] >= 1 {
		bad("grpo.gspo_clip[0]", number(g.GSPOClip[0]), "below 1")
	}
	if g.Agg == "dr_grpo" && g.Normalize != "none" {
		bad("grpo.normalize", strconv.Quote(g.Normalize), `"none" with grpo.agg = "dr_grpo"`)
	}
	if g.MaskToken[0] > g.MaskToken[1] {
		bad("grpo.mask_token", fmt.Sprint(g.MaskToken), "[low, high] with low <= high")
	}
	if g.MaskGeo[0] > g.MaskGeo[1] {
		bad("grpo.mask_geo", fmt.Sprint(g.MaskGeo), "[low, high] with low <= high")
	}
	if g.OldLogProbs == "sampler" && (g.Mismatch != "off" || g.Veto > 0) {
		bad("grpo.old_logprobs", `"sampler"`, `"auto" or "trainer" with grpo.mismatch or grpo.veto switched on`)
	}
	if g.GapWarn > g.GapStop {
		bad("grpo.gap_warn", number(g.GapWarn), fmt.Sprintf("at most grpo.gap_stop (%v)", g.GapStop))
	}
}

func sortedKeys(m map[string]float64) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

//go:embed presets/*.toml
var presets embed.FS

// Presets lists the embedded configurations by name.
func Presets() []string {
	entries, err := presets.ReadDir("presets")
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".toml"))
	}
	return names
}

// Preset returns the text of an embedded configuration.
func Preset(name string) ([]byte, error) {
	b, err := presets.ReadFile("presets/" + name + ".toml")
	if err != nil {
		return nil, &Error{Op: "read preset", Err: fmt.Errorf("%w: no preset %q", ErrConfig, name), Hint: "presets: " + strings.Join(Presets(), ", ")}
	}
	return b, nil
}

// Digest identifies what results depend on: the canonical text without the run's
// name, thread count and checkpoint schedule.
func (c Config) Digest() string {
	c.Run.Name, c.Run.Threads, c.Save = "", 0, SaveConfig{}
	h := sha256.Sum256(c.TOML())
	return hex.EncodeToString(h[:])
}

func shortDuration(d time.Duration) string {
	s := d.String()
	for _, cut := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(s, cut) {
			s = s[:len(s)-2]
		}
	}
	return s
}
