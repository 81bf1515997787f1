package model

import (
	"encoding/json"
	"flag"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
)

var updateLoRA = flag.Bool("update-lora", false, "write testdata/lora/ours again; then run tools/reference/lora.py")

const loraFixture = "testdata/lora"

// trainedAdapter is the adapter of testdata/lora/ours: of every second kind of layer, with random B.
func trainedAdapter(t *testing.T, dev *kernels.Device) *Model {
	t.Helper()
	m := must[*Model](t)(Load(loraFixture+"/base", dev, LoadOptions{}))
	t.Cleanup(m.Close)
	check(t, m.Adapt(LoRA{Rank: 3, Alpha: 5, Targets: []string{"self_attn.q_proj", "o_proj", "in_proj_z", "in_proj_b", "gate_proj"}}, AdaptOptions{Seed: 6}))
	rng := rand.New(rand.NewPCG(41, 43))
	for _, e := range m.Adapter.Params.Entries() {
		if strings.HasSuffix(e.Name, loraB) {
			v := make([]float32, e.Len)
			for i := range v {
				v[i] = float32(0.5 * rng.NormFloat64())
			}
			check(t, m.Adapter.Params.WriteF32(Weights, e.Name, v))
		}
	}
	check(t, m.Adapter.merge())
	return m
}

// TestPEFT: logits of the merged weights are PEFT's beside the frozen ones, for adapters that PEFT made and for one that hs made and PEFT
// loaded. Logits are up to 8 in magnitude and both sides compute in float32: differences are 1e-5 to 4e-5, 2e-5 without an adapter.
func TestPEFT(t *testing.T) {
	dev := execDevice(t, 0)
	if *updateLoRA {
		check(t, os.RemoveAll(loraFixture+"/ours"))
		m := trainedAdapter(t, dev)
		m.Adapter.Base.Path = ""
		check(t, m.SaveAdapter(loraFixture+"/ours", SaveAdapterOptions{}))
	}
	s := must[*Safetensors](t)(ReadSafetensors(loraFixture + "/expect.safetensors"))
	t.Cleanup(func() { check(t, s.Close()) })
	raw := must[[]int64](t)(s.Int64s("ids"))
	b := &Batch{}
	for _, id := range raw {
		b.IDs = append(b.IDs, int32(id))
	}
	half := int32(len(raw) / 2)
	b.Segments = []Segment{{Len: half, Parent: -1}, {Len: half, Parent: -1}}
	plain := must[[]float32](t)(s.Float32s("logits.base"))
	for name, want := range map[string]LoRA{
		"base":    {},
		"plain":   {Rank: 4, Alpha: 6, Targets: []string{"down_proj", "in_proj_a", "in_proj_qkv", "out_proj", "q_proj"}},
		"every":   {Rank: 2, Alpha: 4, Targets: []string{"down_proj", "gate_proj", "in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "k_proj", "o_proj", "out_proj", "q_proj", "up_proj", "v_proj"}},
		"pattern": {Rank: 20, Alpha: 9, RSLoRA: true, Targets: []string{"layers.1.mlp.up_proj", "layers.1.self_attn.v_proj"}},
		"ours":    {Rank: 3, Alpha: 5, Targets: []string{"gate_proj", "in_proj_b", "in_proj_z", "o_proj", "self_attn.q_proj"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := must[*Model](t)(Load(loraFixture+"/base", dev, LoadOptions{}))
			defer m.Close()
			if name != "base" {
				check(t, m.LoadAdapter(filepath.Join(loraFixture, name), AdaptOptions{}))
				got := m.Adapter.LoRA
				slices.Sort(got.Targets)
				if got.Rank != want.Rank || got.Alpha != want.Alpha || got.RSLoRA != want.RSLoRA || !slices.Equal(got.Targets, want.Targets) {
					t.Errorf("adapter %+v, want %+v", got, want)
				}
			}
			expect := must[[]float32](t)(s.Float32s("logits." + name))
			got := must[[]float32](t)(newExec(t, m, ExecOptions{}).Logits(b))
			var diff, moved float64
			for i := range expect {
				diff = max(diff, math.Abs(float64(got[i]-expect[i])))
				moved = max(moved, math.Abs(float64(expect[i]-plain[i])))
			}
			t.Logf("largest difference of logits %.2g", diff)
			if !(diff <= 1e-4) {
				t.Errorf("logits differ by up to %g from PEFT's", diff)
			}
			if name != "base" && moved < 0.1 {
				t.Errorf("the adapter moves logits by %g only", moved)
			}
		})
	}
}

// TestAdapterRoundTrip: a saved adapter loads with the same bits, under either naming, and says where its base is.
func TestAdapterRoundTrip(t *testing.T) {
	dev := execDevice(t, 0)
	m := trainedAdapter(t, dev)
	m.Adapter.Base.Path = loraFixture + "/base"
	want := must[string](t)(m.WeightsSHA256())
	for _, o := range []SaveAdapterOptions{{}, {Multimodal: true}} {
		dir := filepath.Join(t.TempDir(), "adapter")
		check(t, m.SaveAdapter(dir, o))
		info := must[AdapterInfo](t)(ReadAdapterInfo(dir))
		if abs := must[string](t)(filepath.Abs(loraFixture + "/base")); info.Base != abs || !IsAdapter(dir) || IsAdapter(info.Base) {
			t.Errorf("base %q, want %q; adapter %t", info.Base, abs, IsAdapter(dir))
		}
		s := must[*Safetensors](t)(ReadSafetensors(filepath.Join(dir, adapterWeightsFile)))
		prefix := map[bool]string{false: "base_model.model.model.layers.", true: "base_model.model.model.language_model.layers."}[o.Multimodal]
		for _, name := range s.Names() {
			if !strings.HasPrefix(name, prefix) {
				t.Errorf("tensor %q, want names with %q", name, prefix)
			}
		}
		check(t, s.Close())
		again := must[*Model](t)(Load(info.Base, dev, LoadOptions{}))
		check(t, again.LoadAdapter(dir, AdaptOptions{Train: true, Path: info.Base}))
		if got := must[string](t)(again.WeightsSHA256()); got != want {
			t.Errorf("weights %s after saving and loading, %s before", got, want)
		}
		again.Close()
	}
	merged := filepath.Join(t.TempDir(), "merged")
	check(t, m.Save(merged))
	plain := must[*Model](t)(Load(merged, dev, LoadOptions{}))
	defer plain.Close()
	if got := must[string](t)(plain.WeightsSHA256()); got != want {
		t.Errorf("the merged checkpoint has weights %s, want %s", got, want)
	}
	base := must[*Model](t)(Load(loraFixture+"/base", dev, LoadOptions{}))
	defer base.Close()
	if err := base.SaveAdapter(t.TempDir(), SaveAdapterOptions{}); err == nil {
		t.Error("a model without adapter was saved as one")
	}
}

// TestAdapterRefusals: every problem of a directory is listed.
func TestAdapterRefusals(t *testing.T) {
	dev := execDevice(t, 0)
	m := must[*Model](t)(Load(loraFixture+"/base", dev, LoadOptions{}))
	t.Cleanup(m.Close)
	before := must[string](t)(m.WeightsSHA256())
	refuse := func(t *testing.T, dir string, wants ...string) {
		t.Helper()
		err := m.LoadAdapter(dir, AdaptOptions{})
		for _, want := range wants {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want %q in it", err, want)
			}
		}
		if m.Adapter != nil || must[string](t)(m.WeightsSHA256()) != before {
			t.Fatal("the model was changed")
		}
	}
	copied := func(t *testing.T, change func(map[string]any)) string {
		dir := filepath.Join(t.TempDir(), "a")
		check(t, os.CopyFS(dir, os.DirFS(loraFixture+"/plain")))
		var c map[string]any
		check(t, json.Unmarshal(must[[]byte](t)(os.ReadFile(filepath.Join(dir, adapterConfigFile))), &c))
		change(c)
		check(t, os.WriteFile(filepath.Join(dir, adapterConfigFile), must[[]byte](t)(json.Marshal(c)), 0o644))
		return dir
	}
	t.Run("config", func(t *testing.T) {
		bad := map[string]any{"peft_type": "LOHA", "bias": "all", "lora_alpha": 0, "use_dora": true, "modules_to_save": []string{"lm_head"}, "fan_in_fan_out": true,
			"rank_pattern": map[string]int{"q_proj": 8}, "alpha_pattern": map[string]int{"q_proj": 8}, "lora_bias": true, "new_trick": 3, "init_lora_weights": "pissa"}
		dir := copied(t, func(c map[string]any) {
			for k, v := range bad {
				c[k] = v
			}
			c["r"] = "four"
		})
		wants := []string{`r is "four"`, "an unknown key"}
		for k := range bad {
			wants = append(wants, k+" is ")
		}
		refuse(t, dir, wants...)
	})
	t.Run("rank", func(t *testing.T) {
		refuse(t, copied(t, func(c map[string]any) { c["r"] = 5 }), "has shape [4 16], want [5 16] with r 5")
	})
	t.Run("tensors", func(t *testing.T) {
		dir := copied(t, func(map[string]any) {})
		at := "base_model.model.model.layers."
		f := func(name string, shape ...int) NamedTensor {
			return NamedTensor{Name: name, DType: "F32", Shape: shape, Data: make([]byte, 4*elems(shape))}
		}
		check(t, WriteSafetensors(filepath.Join(dir, adapterWeightsFile), []NamedTensor{
			f(at+"0.mlp.up_proj.lora_A.weight", 4, 16), f(at+"0.mlp.down_proj.lora_A.weight", 4, 16), f(at+"0.mlp.down_proj.lora_B.weight", 16, 4),
			f(at+"9.mlp.up_proj.lora_A.weight", 4, 16), f(at+"0.mlp.up_proj.lora_magnitude_vector", 24), f("base_model.model.model.embed_tokens.lora_embedding_A", 4, 53),
			f("base_model.model.lm_head.weight", 53, 16), f(at+"1.mlp.up_proj.bias", 24),
		}, nil))
		refuse(t, dir, `"model.layers.0.mlp.up_proj.lora_B.weight" [24 4] is missing`, "has shape [4 16], want [4 24]", "model.layers.9.mlp.up_proj is no linear layer",
			"DoRA", "an embedding", "lm_head.weight", "a bias")
	})
	t.Run("values", func(t *testing.T) {
		dir := copied(t, func(map[string]any) {})
		path := filepath.Join(dir, adapterWeightsFile)
		b := must[[]byte](t)(os.ReadFile(path))
		copy(b[len(b)-4:], []byte{0, 0, 0xc0, 0x7f})
		check(t, os.WriteFile(path, b, 0o644))
		refuse(t, dir, "NaN")
	})
	t.Run("base", func(t *testing.T) {
		w := trainedAdapter(t, dev)
		dir := t.TempDir()
		check(t, w.SaveAdapter(dir, SaveAdapterOptions{}))
		other := must[*Model](t)(Load(loraFixture+"/base", dev, LoadOptions{}))
		defer other.Close()
		v := must[[]float32](t)(other.Params.ReadF32(Weights, NormName))
		v[0] += 0.5
		check(t, other.Params.WriteF32(Weights, NormName, v))
		if err := other.LoadAdapter(dir, AdaptOptions{}); err == nil || !strings.Contains(err.Error(), "stands beside base weights") {
			t.Errorf("another base: %v", err)
		}
	})
	t.Run("no file", func(t *testing.T) {
		refuse(t, t.TempDir(), adapterConfigFile)
		dir := copied(t, func(map[string]any) {})
		check(t, os.Remove(filepath.Join(dir, adapterWeightsFile)))
		refuse(t, dir, adapterWeightsFile)
	})
}
