package model

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"harness-s/kernels"
)

// Files of a PEFT adapter directory.
const (
	adapterConfigFile  = "adapter_config.json"
	adapterWeightsFile = "adapter_model.safetensors"
)

// Entries of the adapter file's metadata with Base.SHA256: of the base in float32, or rounded to bfloat16. PEFT looks at neither.
const (
	baseHashKey    = "base_weights_sha256"
	roundedHashKey = "base_weights_sha256_bf16"
)

// hashKey is the metadata entry that the model's own weights, before an adapter, have their hash under; "" = none, in float64.
func (m *Model) hashKey() string {
	switch {
	case m.Params.DType == kernels.F64:
		return ""
	case m.Params.rounded.Load():
		return roundedHashKey
	}
	return baseHashKey
}

// adapterJSON is an adapter_config.json as it is written (PEFT 0.21 LoraConfig). What is not named has PEFT's default.
type adapterJSON struct {
	PeftType        string             `json:"peft_type"`
	TaskType        string             `json:"task_type"`
	Base            *string            `json:"base_model_name_or_path"`
	Rank            int                `json:"r"`
	Alpha           float64            `json:"lora_alpha"`
	Targets         []string           `json:"target_modules"`
	RSLoRA          bool               `json:"use_rslora"`
	Dropout         float64            `json:"lora_dropout"`
	Bias            string             `json:"bias"`
	FanInFanOut     bool               `json:"fan_in_fan_out"`
	InferenceMode   bool               `json:"inference_mode"`
	InitLoRAWeights bool               `json:"init_lora_weights"`
	ModulesToSave   []string           `json:"modules_to_save"`
	RankPattern     map[string]int     `json:"rank_pattern"`
	AlphaPattern    map[string]float64 `json:"alpha_pattern"`
	UseDoRA         bool               `json:"use_dora"`
}

// SaveAdapterOptions say how SaveAdapter names things.
type SaveAdapterOptions struct {
	// Multimodal names the modules as Qwen3_5ForConditionalGeneration does (model.language_model.layers.N...), for programs that load the
	// checkpoint with its vision tower. Default is Qwen3_5ForCausalLM (model.layers.N...), which AutoModelForCausalLM and
	// AutoPeftModelForCausalLM make of text-only and of multimodal checkpoints alike.
	Multimodal bool
}

// SaveAdapter writes the adapter as a PEFT directory: adapter_config.json, float32 adapter_model.safetensors and the tokenizer and template
// files. The base is named by its absolute path, and by its hash in the file's metadata. An absent dir appears complete or not at all.
func (m *Model) SaveAdapter(dir string, o SaveAdapterOptions) error {
	a := m.Adapter
	if a == nil {
		return &Error{Op: "save adapter", Err: errors.New("the model has none"), Hint: "give a LoRA run, or a checkpoint with its adapter"}
	}
	c := adapterJSON{PeftType: "LORA", TaskType: "CAUSAL_LM", Rank: a.LoRA.Rank, Alpha: a.LoRA.Alpha, RSLoRA: a.LoRA.RSLoRA, Bias: "none",
		InferenceMode: true, InitLoRAWeights: true, RankPattern: map[string]int{}, AlphaPattern: map[string]float64{}}
	if a.Base.Path != "" {
		path, err := filepath.Abs(a.Base.Path)
		if err != nil {
			return fmt.Errorf("save adapter: %w", err)
		}
		c.Base = &path
	}
	for _, t := range a.LoRA.Targets {
		if t == AllLinear { // PEFT's own list would have the vision tower in it
			c.Targets = m.Config.LinearNames()
			break
		}
		c.Targets = append(c.Targets, t)
	}
	if _, err := os.Stat(filepath.Join(dir, configFile)); err == nil {
		return &Error{Op: "save adapter to " + dir, Err: errors.New("it holds a checkpoint"), Hint: "give another directory: a save replaces what is there"}
	}
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return fmt.Errorf("save adapter: %w", err)
	}
	prefix := "base_model.model.model."
	if o.Multimodal {
		prefix += "language_model."
	}
	var ts []source
	for _, e := range a.Params.entries {
		ts = append(ts, a.Params.source(e, prefix+strings.TrimPrefix(e.Name, "model."), "F32", true))
	}
	files := map[string][]byte{adapterConfigFile: append(text, '\n')}
	m.addFiles(files)
	meta := map[string]string{"format": "pt"}
	if key := m.hashKey(); key != "" {
		meta[key] = a.Base.SHA256
	}
	weights, err := safetensorsFile(adapterWeightsFile, ts, meta)
	if err != nil {
		return fmt.Errorf("save adapter: %w", err)
	}
	var outs []output
	for _, name := range slices.Sorted(maps.Keys(files)) {
		outs = append(outs, content(name, files[name]))
	}
	return writeDir(dir, append(outs, weights), nil)
}

// AdapterInfo is what an adapter directory says of itself.
type AdapterInfo struct {
	LoRA LoRA
	Base string // base_model_name_or_path; empty = the shipped checkpoint, or not known
}

// IsAdapter reports whether dir is an adapter rather than a checkpoint: it has an adapter_config.json and no config.json.
func IsAdapter(dir string) bool {
	_, aerr := os.Stat(filepath.Join(dir, adapterConfigFile))
	_, cerr := os.Stat(filepath.Join(dir, configFile))
	return aerr == nil && errors.Is(cerr, os.ErrNotExist)
}

// ReadAdapterInfo reads adapter_config.json. Everything in it that would make the adapter compute something else than W0 + s B A is an
// error; all are listed.
func ReadAdapterInfo(dir string) (AdapterInfo, error) {
	path := filepath.Join(dir, adapterConfigFile)
	b, err := os.ReadFile(path)
	if err != nil {
		return AdapterInfo{}, &Error{Op: "read adapter", Err: err, Hint: "give a directory that PEFT wrote, or a LoRA run: adapter_config.json, adapter_model.safetensors"}
	}
	info, bad := parseAdapterConfig(b)
	if len(bad) > 0 {
		return info, &Error{Op: "read " + path, Err: bad.err(), Hint: "merge such an adapter with PEFT (merge_and_unload) and load the result as a checkpoint"}
	}
	return info, nil
}

// harmless keys say how an adapter came about, or are PEFT's bookkeeping: they change nothing of what it computes.
var harmless = []string{"auto_mapping", "peft_version", "revision", "inference_mode", "task_type", "lora_dropout", "exclude_modules", "layers_to_transform",
	"layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "qalora_group_size",
	"ensure_weight_tying"}

// refused are keys that must be empty, with what they would mean.
var refused = map[string]string{
	"fan_in_fan_out": "weights stored as [in, out]", "modules_to_save": "modules trained in full", "use_dora": "DoRA's magnitudes", "lora_bias": "a bias beside B",
	"rank_pattern": "ranks that differ between modules", "alpha_pattern": "scales that differ between modules", "layer_replication": "layers used several times",
	"trainable_token_indices": "trained token embeddings", "target_parameters": "adapters on bare parameters", "alora_invocation_tokens": "an adapter that is on for a part of the tokens",
	"use_qalora": "QA-LoRA's pooled inputs", "use_bdlora": "block-diagonal adapters", "arrow_config": "routed adapters",
	"kasa_config": "KaSA's singular values", "velora_config": "VeLoRA's projections", "monteclora_config": "MonteCLoRA's sampled adapters",
}

func parseAdapterConfig(b []byte) (info AdapterInfo, bad problems) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(b, &keys); err != nil {
		return info, problems{err}
	}
	read := func(key string, v any) bool {
		raw, ok := keys[key]
		delete(keys, key)
		if !ok || string(raw) == "null" {
			return false
		}
		if err := json.Unmarshal(raw, v); err != nil {
			bad.addf("%s is %s: %v", key, brief(raw), err)
			return false
		}
		return true
	}
	var kind, bias string
	if read("peft_type", &kind); kind != "LORA" {
		bad.addf("peft_type is %q, want \"LORA\"", kind)
	}
	if read("bias", &bias) && bias != "none" {
		bad.addf("bias is %q: trained biases, want \"none\"", bias)
	}
	if read("r", &info.LoRA.Rank); info.LoRA.Rank < 1 {
		bad.addf("r is %d, want at least 1", info.LoRA.Rank)
	}
	if read("lora_alpha", &info.LoRA.Alpha); !(info.LoRA.Alpha > 0) {
		bad.addf("lora_alpha is %g, want a number above 0", info.LoRA.Alpha)
	}
	read("use_rslora", &info.LoRA.RSLoRA)
	read("base_model_name_or_path", &info.Base)
	if raw := bytes.TrimSpace(keys["target_modules"]); len(raw) > 0 && raw[0] == '"' {
		delete(keys, "target_modules") // a regular expression: the file's tensors say what it matched
	} else {
		read("target_modules", &info.LoRA.Targets)
	}
	// Other starts than these replace the base's weights too, so that the adapter does not fit the published ones.
	if raw := string(keys["init_lora_weights"]); raw != "" && !slices.Contains([]string{"true", "false", "null", `"gaussian"`, `"eva"`, `"orthogonal"`}, raw) {
		bad.addf("init_lora_weights is %s: such an adapter stands beside changed base weights", raw)
	}
	delete(keys, "init_lora_weights")
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		raw := keys[key]
		switch why, known := refused[key]; {
		case slices.Contains(harmless, key), isEmpty(raw):
		case known:
			bad.addf("%s is %s: %s, which is not computed here", key, brief(raw), why)
		default:
			bad.addf("%s is %s: an unknown key", key, brief(raw))
		}
	}
	return info, bad
}

// isEmpty reports whether a value is what a switched-off key has.
func isEmpty(raw json.RawMessage) bool {
	var b bytes.Buffer
	return json.Compact(&b, raw) == nil && slices.Contains([]string{"null", "false", "0", `""`, "[]", "{}"}, b.String())
}

func brief(raw json.RawMessage) string {
	if len(raw) > 60 {
		return string(raw[:57]) + "..."
	}
	return string(raw)
}
