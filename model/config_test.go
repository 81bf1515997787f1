package model

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// published returns the text part of a published config.json (model.md 1.2 to 1.4).
func published(hidden, inter, layers, heads, kv, valueHeads int, tie bool) string {
	var types []string
	for i := range layers {
		types = append(types, fmt.Sprintf("%q", layerPattern(layers, 4)[i]))
	}
	return fmt.Sprintf(`{"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056, "tie_word_embeddings": %v,
		"text_config": {"attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16", "eos_token_id": 248044,
		"full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": %d, "initializer_range": 0.02, "intermediate_size": %d,
		"layer_types": [%s], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": %d,
		"linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text", "num_attention_heads": %d,
		"num_hidden_layers": %d, "num_key_value_heads": %d, "rms_norm_eps": 1e-06, "use_cache": true, "vocab_size": 248320, "mamba_ssm_dtype": "float32",
		"rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}},
		"vision_config": {"depth": 24}}`, tie, hidden, inter, strings.Join(types, ","), valueHeads, heads, layers, kv)
}

func config4B() string { return published(2560, 9216, 32, 16, 4, 32, true) }
func config9B() string { return published(4096, 12288, 32, 16, 4, 32, false) }

// Expected numbers: model.md 1.5 (parameters, tensors, bytes) and 4 (state sizes).
func TestPublishedAccounting(t *testing.T) {
	for _, tc := range []struct {
		name                      string
		json                      string
		params, bytes             int64
		tensors                   int
		kv, recurrent, convStates int64
	}{
		{"0.8B", published(1024, 3584, 24, 8, 2, 16, true), 752393024, 1504791232, 320, 12 << 10, 18 << 20, 331776 * 2},
		{"2B", published(2048, 6144, 24, 8, 2, 16, true), 1881825088, 3763655360, 320, 12 << 10, 18 << 20, 331776 * 2},
		{"4B", config4B(), 4205751296, 8411510272, 426, 32 << 10, 50331648, 1179648},
		{"9B", config9B(), 8953803264, 17907614208, 427, 32 << 10, 50331648, 1179648},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := ParseConfig([]byte(tc.json))
			if err != nil {
				t.Fatal(err)
			}
			if got := c.NumParams(); got != tc.params {
				t.Errorf("parameters %d, want %d", got, tc.params)
			}
			if got := c.PublishedBytes(); got != tc.bytes {
				t.Errorf("bytes %d, want %d", got, tc.bytes)
			}
			if got := len(c.Tensors()); got != tc.tensors {
				t.Errorf("tensors %d, want %d", got, tc.tensors)
			}
			if got := []int64{c.KVBytesPerToken(2), c.RecurrentBytes(4), c.ConvBytes(2)}; !slices.Equal(got, []int64{tc.kv, tc.recurrent, tc.convStates}) {
				t.Errorf("state bytes %v", got)
			}
			if c.RotaryDim != 64 || c.RopeTheta != 1e7 || !slices.Equal(c.EOS, []int32{248044}) || c.RMSEps != 1e-6 || c.MaxPositions != 262144 {
				t.Errorf("values %+v", c)
			}
		})
	}
}

func TestFLOPs(t *testing.T) {
	c := TinyConfig()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if n := c.NumParams(); n < 1_800_000 || n > 2_100_000 {
		t.Errorf("tiny model has %d parameters, want about 1.9 million", n)
	}
	// 2 full layers x 4 x 128 wide; see ForwardFLOPs for the terms.
	if got, want := c.ForwardFLOPs(101)-c.ForwardFLOPs(100), 2.0*4*128; got != want {
		t.Errorf("one more token of context costs %g, want %g", got, want)
	}
	linear := 6 * (7.0*4*32*32 + 2*4*256)
	if got, want := c.ForwardFLOPs(0), 2*float64(c.MatmulParams())+linear; got != want {
		t.Errorf("forward %g, want %g", got, want)
	}
	untied := *c
	untied.TieEmbeddings = false
	if untied.MatmulParams() != c.MatmulParams() || untied.NumParams() != c.NumParams()+1024*128 || untied.HeadName() == c.HeadName() {
		t.Errorf("untied head: %d matrix parameters, %d in all", untied.MatmulParams(), untied.NumParams())
	}
}

func TestConfigProblemsAreListed(t *testing.T) {
	_, err := ParseConfig([]byte(`{"model_type": "llama", "vocab_size": 0, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 3,
		"num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 3, "layer_types": ["linear_attention", "sliding"],
		"hidden_act": "gelu", "attention_bias": true, "attn_output_gate": false, "num_experts": 8, "rms_norm_eps": 0, "linear_conv_kernel_dim": 3,
		"rope_parameters": {"rope_type": "yarn", "partial_rotary_factor": 1.5}, "rope_theta": 0.5, "eos_token_id": "x"}`))
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{`model_type = "llama"`, "vocab_size = 0", "intermediate_size is missing", "num_attention_heads = 3 is not a multiple of num_key_value_heads = 2",
		"linear_num_value_heads = 3 is not a multiple", `layer_types[1] = "sliding"`, `hidden_act = "gelu"`, "attention_bias = true", "attn_output_gate = false", "num_experts = 8",
		"rms_norm_eps = 0", "linear_conv_kernel_dim = 3", `rope_type = "yarn"`, "partial_rotary_factor = 1.5", "rope_theta = 0.5", `eos_token_id = "x"`} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in:\n%v", want, err)
		}
	}
	for _, text := range []string{``, `[]`, `{"text_config": 3}`, `{"vocab_size": "many"}`} {
		if _, err := ParseConfig([]byte(text)); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}

func TestConfigRoundTrip(t *testing.T) {
	for name, text := range map[string]string{"nested": config4B(), "built": string(TinyConfig().JSON())} {
		c, err := ParseConfig([]byte(text))
		if err != nil {
			t.Fatal(name, err)
		}
		flat := c.JSON()
		again, err := ParseConfig(flat)
		if err != nil {
			t.Fatal(name, err)
		}
		a, b := *c, *again
		a.raw, b.raw = nil, nil
		if fmt.Sprintf("%+v", a) != fmt.Sprintf("%+v", b) {
			t.Errorf("%s: %+v became %+v", name, a, b)
		}
		var m map[string]any
		if err := json.Unmarshal(flat, &m); err != nil || m["model_type"] != "qwen3_5_text" || m["dtype"] != "float32" || m["vision_config"] != nil {
			t.Errorf("%s: flat config %v, %v", name, m, err)
		}
	}
	c, err := ParseConfig([]byte(config4B()))
	if err != nil || !strings.Contains(string(c.JSON()), `"mamba_ssm_dtype": "float32"`) {
		t.Errorf("an unknown key was lost (%v)", err)
	}
	old, err := ParseConfig([]byte(`{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 1,
		"linear_num_value_heads": 16, "full_attention_interval": 2, "rope_theta": 1e6, "partial_rotary_factor": 0.5, "eos_token_id": [1, 2]}`))
	if err != nil {
		t.Fatal(err)
	}
	if old.NumFull() != 2 || old.LayerTypes[1] != FullAttention || old.RopeTheta != 1e6 || old.RotaryDim != 128 || len(old.EOS) != 2 || old.TieEmbeddings {
		t.Errorf("interval form: %+v", old)
	}
}

func TestProblemsAreCapped(t *testing.T) {
	var p problems
	if p.err() != nil {
		t.Error("no problems are an error")
	}
	for i := range maxReported + 5 {
		p.addf("problem %d", i)
	}
	lines := strings.Split(p.err().Error(), "\n")
	if len(lines) != maxReported+1 || lines[maxReported] != "and 5 more" || len(p) != maxReported+5 {
		t.Errorf("%d lines, the last %q", len(lines), lines[len(lines)-1])
	}
}

// TestTextOnlyConfigHasNoMTP checks that a configuration written for text weights alone does not promise the head for speculation, which
// other programs would then look for.
func TestTextOnlyConfigHasNoMTP(t *testing.T) {
	cfg, err := ParseConfig([]byte(nestedConfig(t, smallConfig(true))))
	if err != nil {
		t.Fatal(err)
	}
	if text := string(cfg.JSON()); !strings.Contains(text, `"mtp_num_hidden_layers": 0`) {
		t.Errorf("config.json is %s", text)
	}
	if text := string(smallConfig(true).JSON()); strings.Contains(text, "mtp") {
		t.Errorf("config.json is %s", text)
	}
}
