package model

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gorgonia.org/tensor"
)

// Checkpoint is the text tensors of a Hugging Face directory, by their text-only names (model.layers.0....). Names with the prefix
// model.language_model. are mapped to model., and mtp.* and model.visual.* are ignored (model.md 2.4).
type Checkpoint struct {
	files  []*Safetensors
	byName map[string]place
	stored map[place]bool // every tensor, ignored ones included; filled when all is set
	all    bool
	origin string
}

// place is where a tensor lies: the open file and its name there.
type place struct {
	file int
	name string
}

// textName maps a stored name to the text-only name; ok is false for tensors that text-only work ignores.
func textName(stored string) (name string, ok bool) {
	if strings.HasPrefix(stored, "mtp.") || strings.HasPrefix(stored, "model.visual.") {
		return "", false
	}
	if rest, cut := strings.CutPrefix(stored, "model.language_model."); cut {
		return "model." + rest, true
	}
	return stored, true
}

// OpenCheckpoint opens the weights of a directory by memory mapping: model.safetensors, or the shards that
// model.safetensors.index.json names.
func OpenCheckpoint(dir string) (*Checkpoint, error) { return openDir(dir, false) }

// openDir maps the weights of a directory; all asks for the ignored tensors and the shards that hold nothing else too.
func openDir(dir string, all bool) (*Checkpoint, error) {
	return openCheckpoint(os.DirFS(dir), dir, all, func(name string) (*Safetensors, error) {
		return ReadSafetensors(filepath.Join(dir, filepath.FromSlash(name)))
	})
}

// OpenCheckpointFS opens the weights in a file system, reading each file into memory.
func OpenCheckpointFS(fsys fs.FS) (*Checkpoint, error) {
	return openCheckpoint(fsys, "checkpoint", false, func(name string) (*Safetensors, error) {
		b, err := fs.ReadFile(fsys, name)
		if err != nil {
			return nil, err
		}
		s, err := ParseSafetensors(b)
		if err != nil {
			return nil, truncated(name, err)
		}
		return s, nil
	})
}

func openCheckpoint(fsys fs.FS, origin string, all bool, open func(string) (*Safetensors, error)) (_ *Checkpoint, err error) {
	c := &Checkpoint{byName: map[string]place{}, stored: map[place]bool{}, origin: origin, all: all}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if _, serr := fs.Stat(fsys, weightsFile); serr == nil {
		s, err := open(weightsFile)
		if err != nil {
			return nil, err
		}
		c.files = append(c.files, s)
		for _, name := range s.Names() {
			if err := c.add(0, name); err != nil {
				return nil, err
			}
		}
		return c, nil
	}
	idx, rerr := fs.ReadFile(fsys, indexFile)
	if rerr != nil {
		return nil, &Error{Op: "open " + origin, Err: fmt.Errorf("neither %s nor %s: %w", weightsFile, indexFile, rerr),
			Hint: "give the directory of a Hugging Face Qwen3.5 checkpoint with safetensors weights"}
	}
	return c, c.openShards(fsys, idx, open)
}

// openShards opens every shard that holds a wanted tensor; the index alone says which.
func (c *Checkpoint) openShards(fsys fs.FS, idx []byte, open func(string) (*Safetensors, error)) error {
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(idx, &index); err != nil {
		return fmt.Errorf("parse %s: %w", indexFile, err)
	}
	if len(index.WeightMap) == 0 {
		return fmt.Errorf("parse %s: weight_map is empty", indexFile)
	}
	at := map[string]int{}
	var p problems
	for _, name := range slices.Sorted(maps.Keys(index.WeightMap)) {
		file := index.WeightMap[name]
		if _, ok := textName(name); !ok && !c.all {
			continue
		}
		i, opened := at[file]
		if !opened {
			i = -1
			if !fs.ValidPath(file) || strings.Contains(file, "/") {
				p.addf("%s: shard name %q of tensor %q is not a plain file name", indexFile, file, name)
			} else if _, err := fs.Stat(fsys, file); err != nil {
				p = append(p, &Error{Op: "open " + c.origin, Err: fmt.Errorf("shard %s is missing (tensor %q and others): %w", file, name, err),
					Hint: "fetch the missing shard into the same directory"})
			} else if s, err := open(file); err != nil {
				p = append(p, err)
			} else {
				i = len(c.files)
				c.files = append(c.files, s)
			}
			at[file] = i
		}
		if i < 0 {
			continue
		}
		if _, err := c.files[i].Tensor(name); err != nil {
			p.addf("shard %s: tensor %q is in %s but not in the file", file, name, indexFile)
		} else if err := c.add(i, name); err != nil {
			p = append(p, err)
		}
	}
	return p.err()
}

func (c *Checkpoint) add(file int, stored string) error {
	if c.all {
		c.stored[place{file, stored}] = true
	}
	name, ok := textName(stored)
	if !ok {
		return nil
	}
	if old, dup := c.byName[name]; dup {
		return fmt.Errorf("open %s: tensors %q and %q are the same parameter %q", c.origin, old.name, stored, name)
	}
	c.byName[name] = place{file, stored}
	return nil
}

// Close unmaps all files.
func (c *Checkpoint) Close() error {
	var p problems
	for _, f := range c.files {
		if err := f.Close(); err != nil {
			p = append(p, err)
		}
	}
	c.files = nil
	return errors.Join(p...)
}

// Names lists the text tensors by text-only name, sorted.
func (c *Checkpoint) Names() []string { return slices.Sorted(maps.Keys(c.byName)) }

// Tensor returns a tensor by text-only name. Its data is a view that ends with Close.
func (c *Checkpoint) Tensor(name string) (NamedTensor, error) {
	at, ok := c.byName[name]
	if !ok {
		return NamedTensor{}, fmt.Errorf("find tensor %q: not in %s", name, c.origin)
	}
	t, err := c.files[at.file].Tensor(at.name)
	t.Name = name
	return t, err
}

// release says that b, a part of the tensor's data, will not be read soon.
func (c *Checkpoint) release(name string, b []byte) {
	if at, ok := c.byName[name]; ok {
		c.files[at.file].release(b)
	}
}

// Dense returns a copy of a tensor's values in float32.
func (c *Checkpoint) Dense(name string) (*tensor.Dense, error) {
	t, err := c.Tensor(name)
	if err != nil {
		return nil, err
	}
	return t.Dense()
}

// Float32s returns a copy of a tensor's values in float32.
func (c *Checkpoint) Float32s(name string) ([]float32, error) {
	t, err := c.Tensor(name)
	if err != nil {
		return nil, err
	}
	return t.Float32s()
}

// Check compares the checkpoint with what cfg asks for: every tensor present, with its shape and a floating-point dtype, and none left
// over. A separate lm_head in a checkpoint with tied embeddings is allowed and unused, as in the reference. All problems are reported.
func (c *Checkpoint) Check(cfg *Config) error {
	var p problems
	want := map[string]bool{lmHead: true}
	for _, spec := range cfg.Tensors() {
		want[spec.Name] = true
		t, err := c.Tensor(spec.Name)
		if err != nil {
			p.addf("tensor %q %v is missing", spec.Name, spec.Shape)
			continue
		}
		if !slices.Equal(t.Shape, spec.Shape) {
			p.addf("tensor %q has shape %v, config.json asks for %v", spec.Name, t.Shape, spec.Shape)
		}
		switch t.DType {
		case "F32", "BF16", "F16", "F64":
		default:
			p.addf("tensor %q has dtype %s, want F32, BF16, F16 or F64", spec.Name, t.DType)
		}
	}
	for _, name := range c.Names() {
		if !want[name] {
			p.addf("tensor %q is not a parameter of this configuration", name)
		}
	}
	if len(p) == 0 {
		return nil
	}
	return &Error{Op: "check " + c.origin, Err: p.err(), Hint: "config.json and the weights must come from one checkpoint"}
}
