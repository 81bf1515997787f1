package model

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
)

// LayerType is the mixer of a layer.
type LayerType uint8

// Layer types; the texts are those of layer_types in config.json.
const (
	LinearAttention LayerType = iota
	FullAttention
)

// String returns the name used in config.json.
func (t LayerType) String() string {
	if t == FullAttention {
		return "full_attention"
	}
	return "linear_attention"
}

// Config is the text part of a Qwen3.5 configuration (model.md 1.3, 1.4). HeadDim, NumHeads and NumKVHeads describe full attention;
// heads*HeadDim need not equal Hidden. RotaryDim is the number of leading dims of each head that RoPE turns.
type Config struct {
	VocabSize, Hidden, Intermediate, NumLayers int
	NumHeads, NumKVHeads, HeadDim, RotaryDim   int
	RopeTheta, RMSEps                          float64
	LinKeyHeads, LinValueHeads                 int
	LinKeyDim, LinValueDim, ConvKernel         int
	LayerTypes                                 []LayerType
	TieEmbeddings                              bool
	MaxPositions                               int
	EOS                                        []int32
	InitRange                                  float64

	raw json.RawMessage // as read; nil for a config built in code
}

// TensorSpec is one parameter tensor: its text-only Hugging Face name, its row-major shape, and whether published checkpoints store it
// in float32 (A_log and the gated norm) rather than bfloat16.
type TensorSpec struct {
	Name    string
	Shape   []int
	KeepF32 bool
}

// Elems returns the number of elements.
func (t TensorSpec) Elems() int64 { return elems(t.Shape) }

func elems(shape []int) int64 {
	n := int64(1)
	for _, d := range shape {
		n *= int64(d)
	}
	return n
}

// ropeJSON is rope_parameters.
type ropeJSON struct {
	Type    *string  `json:"rope_type"`
	Theta   *float64 `json:"rope_theta"`
	Partial *float64 `json:"partial_rotary_factor"`
}

// configJSON is what ParseConfig reads of config.json; a nil pointer is an absent key.
type configJSON struct {
	ModelType     *string         `json:"model_type"`
	TextConfig    json.RawMessage `json:"text_config"`
	VocabSize     *int            `json:"vocab_size"`
	Hidden        *int            `json:"hidden_size"`
	Intermediate  *int            `json:"intermediate_size"`
	NumLayers     *int            `json:"num_hidden_layers"`
	NumHeads      *int            `json:"num_attention_heads"`
	NumKVHeads    *int            `json:"num_key_value_heads"`
	HeadDim       *int            `json:"head_dim"`
	LinKeyHeads   *int            `json:"linear_num_key_heads"`
	LinValueHeads *int            `json:"linear_num_value_heads"`
	LinKeyDim     *int            `json:"linear_key_head_dim"`
	LinValueDim   *int            `json:"linear_value_head_dim"`
	ConvKernel    *int            `json:"linear_conv_kernel_dim"`
	LayerTypes    []string        `json:"layer_types"`
	FullInterval  *int            `json:"full_attention_interval"`
	Tie           *bool           `json:"tie_word_embeddings"`
	MaxPositions  *int            `json:"max_position_embeddings"`
	RMSEps        *float64        `json:"rms_norm_eps"`
	EOS           json.RawMessage `json:"eos_token_id"`
	Act           *string         `json:"hidden_act"`
	AttnBias      *bool           `json:"attention_bias"`
	OutputGate    *bool           `json:"attn_output_gate"`
	MLPOnly       []int           `json:"mlp_only_layers"`
	NumExperts    *int            `json:"num_experts"`
	Rope          *ropeJSON       `json:"rope_parameters"`
	RopeTheta     *float64        `json:"rope_theta"`
	Partial       *float64        `json:"partial_rotary_factor"`
	InitRange     *float64        `json:"initializer_range"`
}

// problems collects validation failures.
type problems []error

func (p *problems) addf(format string, a ...any) { *p = append(*p, fmt.Errorf(format, a...)) }

// maxReported bounds the list of an error: what follows mostly has the same cause.
const maxReported = 20

// err is nil without problems, else lists the first ones and counts the rest.
func (p problems) err() error {
	if n := len(p) - maxReported; n > 0 {
		p = append(p[:maxReported:maxReported], fmt.Errorf("and %d more", n))
	}
	return errors.Join(p...)
}

// ParseConfig reads a Hugging Face config.json, with the text values at the top level or nested in text_config. It reports every
// problem at once, each with key and value.
func ParseConfig(b []byte) (*Config, error) {
	var top, txt configJSON
	if err := json.Unmarshal(b, &top); err != nil {
		return nil, fmt.Errorf("parse config.json: %w", typeError("", err))
	}
	txt = top
	prefix := ""
	if len(top.TextConfig) > 0 && string(top.TextConfig) != "null" {
		txt, prefix = configJSON{}, "text_config."
		if err := json.Unmarshal(top.TextConfig, &txt); err != nil {
			return nil, fmt.Errorf("parse config.json: %w", typeError(prefix, err))
		}
		if txt.Tie == nil {
			txt.Tie = top.Tie
		}
	}
	c := &Config{raw: append(json.RawMessage(nil), b...)}
	var p problems
	c.readSizes(&txt, prefix, &p)
	c.readRope(&txt, prefix, &p)
	c.readLayers(&txt, prefix, &p)
	c.readEOS(txt.EOS, prefix, &p)
	refuse(&txt, prefix, &p)
	if txt.Tie != nil {
		c.TieEmbeddings = *txt.Tie
	}
	p = append(p, c.check()...)
	if err := p.err(); err != nil {
		return nil, fmt.Errorf("read config.json: %w", err)
	}
	return c, nil
}

// typeError says which key of config.json has a value of the wrong type.
func typeError(prefix string, err error) error {
	var e *json.UnmarshalTypeError
	if !errors.As(err, &e) {
		return err
	}
	want := e.Type.String()
	switch e.Type.Kind() {
	case reflect.Int, reflect.Int32:
		want = "a whole number"
	case reflect.Float64:
		want = "a number"
	case reflect.Bool:
		want = "true or false"
	case reflect.Slice:
		want = "a list"
	case reflect.Struct:
		want = "an object"
	}
	if e.Field == "" {
		return fmt.Errorf("%s is a %s, want %s", cmp.Or(strings.TrimSuffix(prefix, "."), "the file"), e.Value, want)
	}
	return fmt.Errorf("%s%s is a %s, want %s", prefix, e.Field, e.Value, want)
}

func (c *Config) readSizes(j *configJSON, prefix string, p *problems) {
	for _, f := range []struct {
		key string
		src *int
		dst *int
		def int // 0 = required
	}{
		{"vocab_size", j.VocabSize, &c.VocabSize, 0},
		{"hidden_size", j.Hidden, &c.Hidden, 0},
		{"intermediate_size", j.Intermediate, &c.Intermediate, 0},
		{"num_hidden_layers", j.NumLayers, &c.NumLayers, 0},
		{"num_attention_heads", j.NumHeads, &c.NumHeads, 0},
		{"num_key_value_heads", j.NumKVHeads, &c.NumKVHeads, 0},
		{"head_dim", j.HeadDim, &c.HeadDim, 256},
		{"linear_num_key_heads", j.LinKeyHeads, &c.LinKeyHeads, 16},
		{"linear_num_value_heads", j.LinValueHeads, &c.LinValueHeads, 0},
		{"linear_key_head_dim", j.LinKeyDim, &c.LinKeyDim, 128},
		{"linear_value_head_dim", j.LinValueDim, &c.LinValueDim, 128},
		{"linear_conv_kernel_dim", j.ConvKernel, &c.ConvKernel, 4},
		{"max_position_embeddings", j.MaxPositions, &c.MaxPositions, 262144},
	} {
		switch {
		case f.src != nil:
			*f.dst = *f.src
		case f.def != 0:
			*f.dst = f.def
		default:
			p.addf("%s%s is missing", prefix, f.key)
			continue
		}
		if *f.dst < 1 {
			p.addf("%s%s = %d, want >= 1", prefix, f.key, *f.dst)
		}
	}
	c.RMSEps, c.InitRange = 1e-6, 0.02
	if j.RMSEps != nil {
		c.RMSEps = *j.RMSEps
	}
	if j.InitRange != nil {
		c.InitRange = *j.InitRange
	}
}

func (c *Config) readRope(j *configJSON, prefix string, p *problems) {
	c.RopeTheta = 1e7
	partial, key := 0.25, "partial_rotary_factor"
	if j.RopeTheta != nil {
		c.RopeTheta = *j.RopeTheta
	}
	if j.Partial != nil {
		partial = *j.Partial
	}
	if r := j.Rope; r != nil {
		if r.Theta != nil {
			c.RopeTheta = *r.Theta
		}
		if r.Partial != nil {
			partial, key = *r.Partial, "rope_parameters.partial_rotary_factor"
		}
		if r.Type != nil && *r.Type != "default" {
			p.addf("%srope_parameters.rope_type = %q, want \"default\" (no context extension)", prefix, *r.Type)
		}
	}
	if !(partial > 0 && partial <= 1) {
		p.addf("%s%s = %g, want in (0, 1]", prefix, key, partial)
		return
	}
	c.RotaryDim = int(math.Round(float64(c.HeadDim) * partial))
}

func (c *Config) readLayers(j *configJSON, prefix string, p *problems) {
	if j.LayerTypes != nil {
		for i, s := range j.LayerTypes {
			switch s {
			case "linear_attention":
				c.LayerTypes = append(c.LayerTypes, LinearAttention)
			case "full_attention":
				c.LayerTypes = append(c.LayerTypes, FullAttention)
			default:
				p.addf("%slayer_types[%d] = %q, want linear_attention or full_attention", prefix, i, s)
				c.LayerTypes = append(c.LayerTypes, LinearAttention)
			}
		}
		return
	}
	every := 4
	if j.FullInterval != nil {
		every = *j.FullInterval
	}
	if every < 1 {
		p.addf("%sfull_attention_interval = %d, want >= 1", prefix, every)
		return
	}
	c.LayerTypes = layerPattern(min(max(c.NumLayers, 0), maxLayers), every)
}

// layerPattern puts full attention at every n-th layer.
func layerPattern(layers, every int) []LayerType {
	ts := make([]LayerType, layers)
	for i := range ts {
		if (i+1)%every == 0 {
			ts[i] = FullAttention
		}
	}
	return ts
}

func (c *Config) readEOS(raw json.RawMessage, prefix string, p *problems) {
	if len(raw) == 0 || string(raw) == "null" {
		return
	}
	var one int32
	if json.Unmarshal(raw, &one) == nil {
		c.EOS = []int32{one}
		return
	}
	if err := json.Unmarshal(raw, &c.EOS); err != nil {
		p.addf("%seos_token_id = %s, want an id or a list of ids", prefix, raw)
	}
}

// refuse reports features of related architectures that this package does not compute.
func refuse(j *configJSON, prefix string, p *problems) {
	if j.ModelType != nil && !strings.HasPrefix(*j.ModelType, "qwen3_5") {
		p.addf("%smodel_type = %q, want qwen3_5 or qwen3_5_text", prefix, *j.ModelType)
	}
	if j.Act != nil && *j.Act != "silu" {
		p.addf("%shidden_act = %q, want silu", prefix, *j.Act)
	}
	if j.AttnBias != nil && *j.AttnBias {
		p.addf("%sattention_bias = true, want false", prefix)
	}
	if j.OutputGate != nil && !*j.OutputGate {
		p.addf("%sattn_output_gate = false, want true", prefix)
	}
	if j.NumExperts != nil && *j.NumExperts > 0 {
		p.addf("%snum_experts = %d, want a dense model", prefix, *j.NumExperts)
	}
}

const (
	maxLayers = 1 << 12
	maxDim    = 1 << 24
)

// Validate reports every inconsistency of c at once.
func (c *Config) Validate() error {
	if err := errors.Join(c.check()...); err != nil {
		return fmt.Errorf("check config: %w", err)
	}
	return nil
}

// check lists relations between values; missing or non-positive sizes are not repeated here.
func (c *Config) check() []error {
	var p problems
	divides := func(small int, smallName string, big int, bigName string) {
		if small > 0 && big > 0 && big%small != 0 {
			p.addf("%s = %d is not a multiple of %s = %d", bigName, big, smallName, small)
		}
	}
	divides(c.NumKVHeads, "num_key_value_heads", c.NumHeads, "num_attention_heads")
	divides(c.LinKeyHeads, "linear_num_key_heads", c.LinValueHeads, "linear_num_value_heads")
	if c.ConvKernel > 0 && c.ConvKernel != 4 {
		p.addf("linear_conv_kernel_dim = %d, want 4", c.ConvKernel)
	}
	if c.RotaryDim > 0 && c.RotaryDim%2 != 0 {
		p.addf("rotary dim = %d, want an even number", c.RotaryDim)
	}
	if c.HeadDim > 0 && (c.RotaryDim > c.HeadDim || c.RotaryDim < 2) {
		p.addf("rotary dim %d outside 2..head_dim %d", c.RotaryDim, c.HeadDim)
	}
	if c.NumLayers > maxLayers {
		p.addf("num_hidden_layers = %d, want <= %d", c.NumLayers, maxLayers)
	} else if c.NumLayers > 0 && len(c.LayerTypes) != c.NumLayers {
		p.addf("layer_types has %d entries, num_hidden_layers = %d", len(c.LayerTypes), c.NumLayers)
	}
	for _, f := range []struct {
		name string
		v    int
	}{{"vocab_size", c.VocabSize}, {"hidden_size", c.Hidden}, {"intermediate_size", c.Intermediate},
		{"num_attention_heads", c.NumHeads}, {"head_dim", c.HeadDim}, {"linear_num_value_heads", c.LinValueHeads},
		{"linear_key_head_dim", c.LinKeyDim}, {"linear_value_head_dim", c.LinValueDim}, {"max_position_embeddings", c.MaxPositions}} {
		if f.v > maxDim {
			p.addf("%s = %d, want <= %d", f.name, f.v, maxDim)
		}
	}
	if !(c.RMSEps > 0 && c.RMSEps < 1) {
		p.addf("rms_norm_eps = %g, want in (0, 1)", c.RMSEps)
	}
	if !(c.RopeTheta > 1) || math.IsInf(c.RopeTheta, 0) {
		p.addf("rope_theta = %g, want > 1", c.RopeTheta)
	}
	for _, id := range c.EOS {
		if id < 0 || c.VocabSize > 0 && int(id) >= c.VocabSize {
			p.addf("eos_token_id = %d outside vocab_size %d", id, c.VocabSize)
		}
	}
	return p
}

// KeyDim is the width of all q (or k) heads of a linear layer.
func (c *Config) KeyDim() int { return c.LinKeyHeads * c.LinKeyDim }

// ValueDim is the width of all v heads of a linear layer.
func (c *Config) ValueDim() int { return c.LinValueHeads * c.LinValueDim }

// ConvChannels is the number of channels of the causal convolution: q, k and v.
func (c *Config) ConvChannels() int { return 2*c.KeyDim() + c.ValueDim() }

// NumFull returns the number of full-attention layers.
func (c *Config) NumFull() int {
	n := 0
	for _, t := range c.LayerTypes {
		if t == FullAttention {
			n++
		}
	}
	return n
}

// NumLinear returns the number of Gated DeltaNet layers.
func (c *Config) NumLinear() int { return len(c.LayerTypes) - c.NumFull() }

// JSON returns a flat, text-only config.json for a float32 checkpoint with text-only tensor names. Keys that were read and are not
// known here stay.
func (c *Config) JSON() []byte { return c.flat("float32") }

// flat is JSON for weights of a dtype.
func (c *Config) flat(dtype string) []byte {
	m := map[string]json.RawMessage{}
	if c.raw != nil {
		var top map[string]json.RawMessage
		if json.Unmarshal(c.raw, &top) == nil {
			m = top
			if t, ok := top["text_config"]; ok && string(t) != "null" {
				var txt map[string]json.RawMessage
				if json.Unmarshal(t, &txt) == nil {
					m = txt
				}
			}
		}
	}
	set := func(key string, v any) {
		if b, err := json.Marshal(v); err == nil {
			m[key] = b
		}
	}
	types := make([]string, len(c.LayerTypes))
	for i, t := range c.LayerTypes {
		types[i] = t.String()
	}
	if c.raw == nil {
		set("vocab_size", c.VocabSize)
		set("hidden_size", c.Hidden)
		set("intermediate_size", c.Intermediate)
		set("num_hidden_layers", c.NumLayers)
		set("num_attention_heads", c.NumHeads)
		set("num_key_value_heads", c.NumKVHeads)
		set("head_dim", c.HeadDim)
		set("linear_num_key_heads", c.LinKeyHeads)
		set("linear_num_value_heads", c.LinValueHeads)
		set("linear_key_head_dim", c.LinKeyDim)
		set("linear_value_head_dim", c.LinValueDim)
		set("linear_conv_kernel_dim", c.ConvKernel)
		set("max_position_embeddings", c.MaxPositions)
		set("rms_norm_eps", c.RMSEps)
		set("initializer_range", c.InitRange)
		set("hidden_act", "silu")
		set("attention_bias", false)
		set("attention_dropout", 0.0)
		set("rope_parameters", map[string]any{"rope_type": "default", "rope_theta": c.RopeTheta,
			"partial_rotary_factor": float64(c.RotaryDim) / float64(c.HeadDim), "mrope_interleaved": true, "mrope_section": mropeSections(c.RotaryDim / 2)})
		if len(c.EOS) == 1 {
			set("eos_token_id", c.EOS[0])
		} else if len(c.EOS) > 1 {
			set("eos_token_id", c.EOS)
		}
	}
	set("architectures", []string{"Qwen3_5ForCausalLM"})
	set("model_type", "qwen3_5_text")
	set("dtype", dtype)
	set("layer_types", types)
	set("tie_word_embeddings", c.TieEmbeddings)
	if _, ok := m["mtp_num_hidden_layers"]; ok {
		set("mtp_num_hidden_layers", 0) // its weights are not written
	}
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		panic(fmt.Sprintf("encode config: %v", err)) // m holds only valid JSON
	}
	return append(b, '\n')
}

// mropeSections splits n rotation frequencies over time, height and width as the published configs do (11, 11, 10 of 32).
func mropeSections(n int) []int { return []int{(n + 2) / 3, (n + 1) / 3, n / 3} }
