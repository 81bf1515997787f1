package model

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// LoadAdapter puts the adapter of a PEFT directory beside the model's weights. Which modules it adapts is what the file has tensors for. An
// adapter that SaveAdapter wrote names its base by hash, and another base is refused; with o.Train it can be trained on. Every problem of the
// directory is in the error, before anything is allocated.
func (m *Model) LoadAdapter(dir string, o AdaptOptions) (err error) {
	info, err := ReadAdapterInfo(dir)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, adapterWeightsFile)
	s, err := ReadSafetensors(path)
	if errors.Is(err, os.ErrNotExist) {
		return &Error{Op: "load adapter", Err: err, Hint: "write the adapter with safe_serialization=True: pickled adapter_model.bin files are not read"}
	} else if err != nil {
		return fmt.Errorf("load adapter: %w", err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	f := adapterFile{cfg: m.Config, rank: info.LoRA.Rank, tensors: map[string]NamedTensor{}}
	f.read(s)
	if len(f.bad) > 0 {
		return &Error{Op: "load " + path, Err: f.bad.err(), Hint: "base and adapter must be of one model"}
	}
	info.LoRA.Targets = f.targets(info.LoRA)
	if err := m.newAdapter(info.LoRA, o); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			m.dropAdapter()
		}
	}()
	if want, have := s.Metadata[m.hashKey()], m.Adapter.Base.SHA256; want != "" && want != have {
		return &Error{Op: "load adapter", Err: fmt.Errorf("%s stands beside base weights %.16s, these are %.16s", dir, want, have),
			Hint: "give the base that the adapter was trained on, unchanged (" + baseName(info.Base) + ")"}
	}
	for _, e := range m.Adapter.Params.entries {
		v, err := f.tensors[e.Name].Float32s()
		if err != nil {
			return err
		}
		if err := checkFinite(e.Name, e.Shape, v, 0); err != nil {
			return &Error{Op: "load " + path, Err: err, Hint: "the adapter is damaged or its training diverged; use another one"}
		}
		if err := m.Adapter.Params.WriteF32(Weights, e.Name, v); err != nil {
			return err
		}
	}
	return m.Adapter.merge()
}

func baseName(path string) string {
	if path == "" {
		return "the shipped checkpoint, or not named in " + adapterConfigFile
	}
	return path
}

// adapterFile sorts the tensors of an adapter file by the names that they have here.
type adapterFile struct {
	cfg     *Config
	rank    int
	tensors map[string]NamedTensor
	modules []TensorSpec // adapted matrices, in table order
	bad     problems
}

// read checks that the file has A [rank, in] and B [out, rank] of some linear layers and nothing else.
func (f *adapterFile) read(s *Safetensors) {
	stored := map[string]string{}
	for _, name := range s.Names() {
		t, err := s.Tensor(name)
		if err != nil {
			f.bad = append(f.bad, err)
			continue
		}
		here, ok := adapterName(name)
		switch {
		case !ok:
			f.bad.addf("tensor %q: %s", name, strange(name))
		case stored[here] != "":
			f.bad.addf("tensors %q and %q are the same parameter", stored[here], name)
		case !slices.Contains([]string{"F32", "BF16", "F16", "F64"}, t.DType):
			f.bad.addf("tensor %q has dtype %s, want F32, BF16, F16 or F64", name, t.DType)
		default:
			f.tensors[here], stored[here] = t, name
		}
	}
	known := map[string]bool{}
	for _, w := range f.cfg.linears() {
		pair := adapterTensors([]TensorSpec{w}, f.rank)
		_, a := f.tensors[pair[0].Name]
		_, b := f.tensors[pair[1].Name]
		if !a && !b {
			continue
		}
		f.modules = append(f.modules, w)
		for _, want := range pair {
			known[want.Name] = true
			if t, ok := f.tensors[want.Name]; !ok {
				f.bad.addf("tensor %q %v is missing", want.Name, want.Shape)
			} else if !slices.Equal(t.Shape, want.Shape) {
				f.bad.addf("tensor %q has shape %v, want %v with r %d", t.Name, t.Shape, want.Shape, f.rank)
			}
		}
	}
	for _, name := range s.Names() {
		if here, ok := adapterName(name); ok && !known[here] {
			f.bad.addf("tensor %q: %s is no linear layer of this model, which has %s", name, here[:strings.Index(here, ".lora_")], strings.Join(f.cfg.LinearNames(), ", "))
		}
	}
	if len(f.modules) == 0 && len(f.bad) == 0 {
		f.bad.addf("no tensor of an adapter")
	}
}

// adapterName maps PEFT's name of an adapter tensor to the one it has here. In front of layers.N stands what the class that was adapted
// has there: model. (causal language model), model.language_model. (with vision tower), or less of it for a bare text model.
func adapterName(stored string) (string, bool) {
	rest, ok := strings.CutPrefix(stored, "base_model.model.")
	if !ok || !strings.HasSuffix(rest, loraA) && !strings.HasSuffix(rest, loraB) {
		return "", false
	}
	rest = strings.TrimPrefix(strings.TrimPrefix(rest, "model."), "language_model.")
	return "model." + rest, true
}

// strange says what is wrong with a tensor that is neither A nor B.
func strange(name string) string {
	switch {
	case strings.Contains(name, "lora_embedding_"):
		return "an adapter of an embedding, which is not computed here"
	case strings.Contains(name, "lora_magnitude_vector"):
		return "a magnitude of DoRA, which is not computed here"
	case strings.HasSuffix(name, ".bias"):
		return "a bias, which no layer of this model has"
	}
	return "not an adapter tensor (base_model.model...." + loraA[1:] + " or " + loraB[1:] + ")"
}

// targets are the config's when they name the modules of the file and no other, else the modules one by one.
func (f *adapterFile) targets(l LoRA) []string {
	if ms, err := l.Matrices(f.cfg); err == nil && slices.EqualFunc(ms, f.modules, func(a, b TensorSpec) bool { return a.Name == b.Name }) {
		return l.Targets
	}
	var out []string
	for _, w := range f.modules {
		out = append(out, strings.TrimPrefix(moduleOf(w.Name), "model."))
	}
	return out
}
