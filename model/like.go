package model

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
)

// shape is what differs between the released dense Qwen3.5 sizes.
type shape struct {
	name                         string
	hidden, intermediate, layers int
	heads, kvHeads, valueHeads   int
	tied                         bool
}

// releases are the released sizes. Source: model.md 1.2 to 1.4, which quote the config.json files of Qwen/Qwen3.5-0.8B (revision
// 2fc06364), -2B (15852e8c), -4B (851bf6e8) and -9B (c2022362). Parameter and byte totals of model.md 1.5 are checked in tests.
var releases = []shape{
	{name: "0.8b", hidden: 1024, intermediate: 3584, layers: 24, heads: 8, kvHeads: 2, valueHeads: 16, tied: true},
	{name: "2b", hidden: 2048, intermediate: 6144, layers: 24, heads: 8, kvHeads: 2, valueHeads: 16, tied: true},
	{name: "4b", hidden: 2560, intermediate: 9216, layers: 32, heads: 16, kvHeads: 4, valueHeads: 32, tied: true},
	{name: "9b", hidden: 4096, intermediate: 12288, layers: 32, heads: 16, kvHeads: 4, valueHeads: 32, tied: false},
}

// LikeNames lists the sizes that Like knows, smallest first.
func LikeNames() []string {
	names := make([]string, len(releases))
	for i, s := range releases {
		names[i] = s.name
	}
	return names
}

// Like returns the config.json of a released size with the first layers of its layers, in the published form, and what it says; layers 0
// keeps all. dtype is F32 or BF16. Three linear layers are followed by a full one, so a multiple of four keeps the published proportion.
// The text model alone is described: there is no vision_config, and the weights have neither a vision tower nor the layer for speculation, and
// mtp_num_hidden_layers says so.
func Like(name string, layers int, dtype string) (text []byte, cfg *Config, err error) {
	for _, s := range releases {
		if s.name != name {
			continue
		}
		if layers == 0 {
			layers = s.layers
		}
		if layers < 4 || layers > s.layers || layers%4 != 0 {
			return nil, nil, &Error{Op: "make configuration", Err: fmt.Errorf("layers = %d, want a multiple of 4 from 4 to %d, the layers of %s", layers, s.layers, name),
				Hint: fmt.Sprintf("--layers 4, or leave it out for all %d: three linear layers come before each full one", s.layers)}
		}
		long, err := longDType(dtype)
		if err != nil {
			return nil, nil, err
		}
		b, err := json.MarshalIndent(s.config(layers, long), "", "    ")
		if err != nil {
			return nil, nil, fmt.Errorf("encode config of %s: %w", name, err)
		}
		b = append(b, '\n')
		cfg, err := ParseConfig(b)
		return b, cfg, err
	}
	return nil, nil, &Error{Op: "make configuration", Err: fmt.Errorf("unknown size %q", name), Hint: "one of: " + strings.Join(LikeNames(), ", ")}
}

// longDType is the name that config.json uses for a safetensors dtype that WriteRandom can write.
func longDType(dtype string) (string, error) {
	switch dtype {
	case "F32":
		return "float32", nil
	case "BF16":
		return "bfloat16", nil
	}
	return "", &Error{Op: "make checkpoint", Err: fmt.Errorf("dtype %q", dtype), Hint: "one of: F32, BF16"}
}

func (s shape) config(layers int, dtype string) map[string]any {
	types := make([]string, layers)
	for i, t := range layerPattern(layers, 4) {
		types[i] = t.String()
	}
	text := map[string]any{
		"model_type": "qwen3_5_text", "dtype": dtype, "vocab_size": 248320, "eos_token_id": 248044,
		"hidden_size": s.hidden, "intermediate_size": s.intermediate, "hidden_act": "silu", "mlp_only_layers": []string{},
		"num_hidden_layers": layers, "full_attention_interval": 4, "layer_types": types,
		"num_attention_heads": s.heads, "num_key_value_heads": s.kvHeads, "head_dim": 256,
		"attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true,
		"linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_num_value_heads": s.valueHeads,
		"linear_key_head_dim": 128, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
		"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "use_cache": true,
		"mtp_num_hidden_layers": 0, "mtp_use_dedicated_embeddings": false,
		"rope_parameters": map[string]any{"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
			"mrope_section": []int{11, 11, 10}, "mrope_interleaved": true},
	}
	if s.tied {
		text["tie_word_embeddings"] = true // the file of 9b has the key at the top only
	}
	return map[string]any{
		"architectures": []string{"Qwen3_5ForConditionalGeneration"}, "model_type": "qwen3_5", "tie_word_embeddings": s.tied,
		"image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
		"transformers_version": "4.57.0.dev0", "text_config": text,
	}
}

// RandomOptions of WriteRandom. DType is F32 or BF16; in a BF16 checkpoint A_log and the gated norm stay F32, as published.
type RandomOptions struct {
	Seed     uint64
	DType    string
	Progress func(done, total int64) // bytes; may be nil
}

// randomBytes is the size of the tensors that WriteRandom writes.
func randomBytes(cfg *Config, dtype string) int64 {
	if dtype == "BF16" {
		return cfg.PublishedBytes()
	}
	return 4 * cfg.NumParams()
}

// RandomSize returns what WriteRandom needs on disk: tensors, header, config.json and SHA256SUMS.
func RandomSize(cfg *Config, configJSON []byte, dtype string) (int64, error) {
	_, ts, err := randomSources(cfg, dtype)
	if err != nil {
		return 0, err
	}
	head, err := encodeHeader(ts, map[string]string{"format": "pt"})
	if err != nil {
		return 0, err
	}
	sums := 0
	for _, name := range []string{configFile, weightsFile} {
		sums += 2*sha256.Size + len("  \n") + len(name)
	}
	return randomBytes(cfg, dtype) + int64(len(head)+len(configJSON)+sums), nil
}

// randomSources lists the tensors to write, and the same with their published names, float32 first so that each starts at a multiple of
// its element size. The sources have no data function.
func randomSources(cfg *Config, dtype string) (specs []TensorSpec, ts []source, err error) {
	if _, err := longDType(dtype); err != nil {
		return nil, nil, err
	}
	for _, keep := range []bool{true, false} {
		for _, t := range cfg.Tensors() {
			if t.KeepF32 == keep {
				specs = append(specs, t)
			}
		}
	}
	for _, t := range specs {
		s := source{name: t.Name, dtype: dtype, shape: t.Shape}
		if rest, ok := strings.CutPrefix(t.Name, "model."); ok {
			s.name = "model.language_model." + rest
		}
		if t.KeepF32 {
			s.dtype = "F32"
		}
		s.bytes = t.Elems() * int64(dtypeBytes(s.dtype))
		ts = append(ts, s)
	}
	return specs, ts, nil
}

// WriteRandom writes a checkpoint with the weights of NewRandom, in the storage type asked for, to a directory that is empty or does not
// exist, as SaveAs does: complete or not at all. Host memory stays at a few MiB: values are drawn and written in runs. After an error or
// the end of ctx nothing stays.
func WriteRandom(ctx context.Context, dir string, cfg *Config, configJSON []byte, o RandomOptions) error {
	specs, ts, err := randomSources(cfg, o.DType)
	if err != nil {
		return err
	}
	if err := CheckEmptyDir(dir); err != nil {
		return err
	}
	w := &randomWriter{ctx: ctx, o: o, total: randomBytes(cfg, o.DType), std: cfg.InitRange}
	if w.std == 0 {
		w.std = 0.02
	}
	for i, t := range specs {
		ts[i].write = func(f io.Writer) error { return w.tensor(f, t, ts[i].dtype) }
	}
	return writeCheckpoint(dir, map[string][]byte{configFile: configJSON}, ts, 0)
}

// CheckEmptyDir returns an error unless dir is an empty directory or does not exist.
func CheckEmptyDir(dir string) error {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return &Error{Op: "write checkpoint", Err: err, Hint: "give a directory that is empty or does not exist"}
	case len(entries) > 0:
		return &Error{Op: "write checkpoint", Err: fmt.Errorf("directory %s is not empty, it has %s", dir, entries[0].Name()),
			Hint: "give a directory that is empty or does not exist, or remove this one"}
	}
	return nil
}

// randomRun is the number of values drawn at a time.
const randomRun = 1 << 18

type randomWriter struct {
	ctx         context.Context
	o           RandomOptions
	std         float64
	done, total int64
}

// tensor draws and writes one tensor in runs; the next is drawn while one is written.
func (w *randomWriter) tensor(f io.Writer, t TensorSpec, dtype string) error {
	next := initial(Entry{Name: t.Name, Shape: t.Shape}, w.o.Seed, w.std)
	n := t.Elems()
	free, full := make(chan []float32, 2), make(chan []float32, 2)
	for range cap(free) {
		free <- make([]float32, min(n, randomRun))
	}
	ctx, stop := context.WithCancel(w.ctx)
	var drawing sync.WaitGroup
	defer drawing.Wait()
	defer stop()
	drawing.Go(func() {
		defer close(full)
		for left := n; left > 0; {
			select {
			case <-ctx.Done():
				return
			case v := <-free:
				v = v[:min(left, randomRun)]
				next(v)
				left -= int64(len(v))
				full <- v
			}
		}
	})
	b := make([]byte, min(n, randomRun)*int64(dtypeBytes(dtype)))
	for v := range full {
		if err := w.run(f, v, dtype, b[:len(v)*dtypeBytes(dtype)]); err != nil {
			return err
		}
		free <- v[:cap(v)]
	}
	return w.ctx.Err()
}

// run writes values of one tensor, encoded in b.
func (w *randomWriter) run(f io.Writer, v []float32, dtype string, b []byte) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if err := EncodeFloat32(b, dtype, v); err != nil {
		return err
	}
	if _, err := f.Write(b); err != nil {
		return err
	}
	w.done += int64(len(b))
	if w.o.Progress != nil {
		w.o.Progress(w.done, w.total)
	}
	return nil
}
