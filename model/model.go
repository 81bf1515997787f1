package model

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"strings"

	"harness-s/kernels"
)

// Model is a configuration, its parameters on a device, and the tokenizer that came with it.
type Model struct {
	Config  *Config
	Params  *Params
	Adapter *Adapter // nil without; Adapt and LoadAdapter make one
	Dev     *kernels.Device
	Tok     *Tokenizer        // nil when the directory has none
	Files   map[string][]byte // tokenizer and template files of the directory, written again by Save

	region *Region // memory that sampler and executor share, nil without
}

// LoadOptions say how parameters are held. DType is kernels.F32 (the default), kernels.F64 on the cpu, or kernels.BF16 where the device
// stores it (emu, cuda). Train allocates gradients and moments, stored as Optim says. Weights are split by Optim.HiLo also when they are not trained, so that they are those that training computes with.
// SkipFiniteCheck accepts NaN and infinite weights.
type LoadOptions struct {
	DType           kernels.DType
	Train           bool
	Optim           Recipe
	SkipFiniteCheck bool
	// Shared leaves the gradients without memory until Share gives them some: they lie in it by turns with the sampler's.
	Shared bool
}

// FS is the tokenizer and template files that came with the weights.
func (m *Model) FS() fs.FS { return memFS(m.Files) }

// sideFiles are the files of a checkpoint directory that Save carries over.
func sideFiles() []string {
	return []string{"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
		"chat_template.jinja", "generation_config.json"}
}

// Load reads a Hugging Face Qwen3.5 directory: config.json, safetensors weights, and tokenizer.json when there is one. Beside the arenas
// on the device it needs less than 128 MiB of host memory whatever the size of the checkpoint: the files are mapped, up to eight pieces of
// 2^20 elements are decoded at a time, and their pages are given back. (The tokenizer's tables are not counted.)
func Load(dir string, dev *kernels.Device, o LoadOptions) (*Model, error) {
	return load(os.DirFS(dir), dir, dev, o, func() (*Checkpoint, error) { return OpenCheckpoint(dir) })
}

// LoadFS is Load from a file system, such as the one of TinyFS; the weight files are read into memory as a whole.
func LoadFS(fsys fs.FS, dev *kernels.Device, o LoadOptions) (*Model, error) {
	return load(fsys, "checkpoint", dev, o, func() (*Checkpoint, error) { return OpenCheckpointFS(fsys) })
}

func load(fsys fs.FS, origin string, dev *kernels.Device, o LoadOptions, open func() (*Checkpoint, error)) (_ *Model, err error) {
	b, err := fs.ReadFile(fsys, configFile)
	if err != nil {
		return nil, &Error{Op: "load " + origin, Err: err, Hint: "give the directory of a Hugging Face Qwen3.5 checkpoint (config.json, *.safetensors)"}
	}
	cfg, err := ParseConfig(b)
	if err != nil {
		hint := "only dense Qwen3.5 text models are supported"
		if !json.Valid(b) {
			hint = "the file is damaged: copy it again from where the checkpoint came from"
		}
		return nil, &Error{Op: "load " + origin, Err: err, Hint: hint}
	}
	m := &Model{Config: cfg, Dev: dev, Files: map[string][]byte{}}
	for _, name := range sideFiles() {
		b, err := fs.ReadFile(fsys, name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("load %s: %w", origin, err)
		}
		m.Files[name] = b
	}
	if b, ok := m.Files[tokenizerFile]; ok {
		if m.Tok, err = parseTokenizer(b, m.Files[tokenizerConfigFile]); err != nil {
			return nil, fmt.Errorf("load %s: %w", origin, err)
		}
		if n := m.Tok.VocabSize(); n > cfg.VocabSize {
			return nil, fmt.Errorf("load %s: tokenizer has %d tokens, config.json vocab_size is %d", origin, n, cfg.VocabSize)
		}
	}
	c, err := open()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.Check(cfg); err != nil {
		return nil, err
	}
	if m.Params, err = newParams(cfg.Tensors(), dev, o); err != nil {
		return nil, err
	}
	if err := m.Params.load(c, !o.SkipFiniteCheck); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// newBlank makes a model of zeros.
func newBlank(cfg *Config, dev *kernels.Device, o LoadOptions) (*Model, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	p, err := newParams(cfg.Tensors(), dev, o)
	if err != nil {
		return nil, err
	}
	return &Model{Config: cfg, Params: p, Dev: dev, Files: map[string][]byte{}}, nil
}

// NewRandom makes a model with random weights fit for training from scratch: matrices and embedding normal with deviation InitRange,
// convolution uniform in +-1/sqrt(taps), zero-centred norms 0, gated norm 1, A_log = log(uniform(0, 16)), and dt_bias such that
// softplus(dt_bias) is log-uniform in [0.001, 0.1], i.e. states that last for tens to thousands of tokens (the published reference
// starts from dt_bias 1, which forgets within one token). Each tensor has its own stream of random numbers keyed by seed and name, so
// values do not depend on the order of tensors; tensors are drawn side by side, in pieces.
func NewRandom(cfg *Config, dev *kernels.Device, seed uint64, o LoadOptions) (*Model, error) {
	m, err := newBlank(cfg, dev, o)
	if err != nil {
		return nil, err
	}
	p := m.Params
	std := cfg.InitRange
	if std == 0 {
		std = 0.02
	}
	if err := p.draw(seed, std); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// initial returns a function that fills its argument with the next values of a tensor of NewRandom.
func initial(e Entry, seed uint64, std float64) func(dst []float32) {
	h := fnv.New64a()
	h.Write([]byte(e.Name))
	rng := rand.New(rand.NewPCG(seed, h.Sum64()))
	each := func(value func() float64) func([]float32) {
		return func(dst []float32) {
			for i := range dst {
				dst[i] = float32(value())
			}
		}
	}
	switch {
	case strings.HasSuffix(e.Name, "linear_attn.A_log"):
		return each(func() float64 { return math.Log(16 * (1 - rng.Float64())) }) // of (0, 16]
	case strings.HasSuffix(e.Name, "linear_attn.dt_bias"):
		return each(func() float64 {
			dt := math.Exp(math.Log(1e-3) + rng.Float64()*math.Log(100)) // 0.001 to 0.1, log-uniform
			return math.Log(math.Expm1(dt))                              // softplus(dt_bias) = dt
		})
	case strings.HasSuffix(e.Name, "linear_attn.norm.weight"):
		return each(func() float64 { return 1 })
	case strings.HasSuffix(e.Name, "conv1d.weight"):
		return each(func() float64 { return rng.Float64() - 0.5 }) // +-1/sqrt(taps)
	case len(e.Shape) == 1: // zero-centred norms
		return func(dst []float32) { clear(dst) }
	}
	return each(func() float64 { return std * rng.NormFloat64() })
}

// Save writes a Hugging Face directory: a flat text-only config.json, float32 model.safetensors with text-only names, and the
// tokenizer and template files that were loaded. It is what a run's checkpoint holds; SaveAs writes other forms. Split weights are saved as
// their float32 masters, whose nearest bfloat16 and remainder Load finds again bit for bit.
func (m *Model) Save(dir string) error { return m.SaveAs(dir, SaveOptions{}) }

// WeightsSHA256 returns the hexadecimal SHA-256 of the weights in table order: of float32 masters, and in float32 also where bfloat16 is all
// that is held, so that a bfloat16 checkpoint has one hash whatever the dtype; in F64 of the doubles.
func (m *Model) WeightsSHA256() (string, error) { return m.Params.sha256() }

// Close frees the parameters.
func (m *Model) Close() {
	m.region.Close()
	if m.Adapter != nil {
		m.dropAdapter()
	}
	if m.Params != nil {
		m.Params.free()
	}
}
