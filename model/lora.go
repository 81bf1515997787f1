package model

import (
	"math"
	"slices"
	"strings"
)

// LoRA asks for a low-rank adapter beside frozen weights (Hu et al. 2021, arXiv 2106.09685): a matrix W0 [out, in] becomes
// W' = W0 + s B A with A [Rank, in], B [out, Rank] and s = Alpha/Rank, or Alpha/sqrt(Rank) with RSLoRA (Kalajdzievski 2023, arXiv 2312.03732).
//
// Targets are names of linear layers as PEFT matches them: the last parts of a module's name, such as "q_proj", "mlp.up_proj" or
// "layers.3.mlp.up_proj". AllLinear stands for every linear layer but the head.
type LoRA struct {
	Rank    int
	Alpha   float64
	Targets []string
	RSLoRA  bool
}

// AllLinear is the target that stands for every linear layer but the head.
const AllLinear = "all-linear"

// Scale returns s.
func (l LoRA) Scale() float64 {
	if l.RSLoRA {
		return l.Alpha / math.Sqrt(float64(l.Rank))
	}
	return l.Alpha / float64(l.Rank)
}

// Matrices lists the weights of cfg that l adapts, in table order. Every problem of l is in the error.
func (l LoRA) Matrices(cfg *Config) ([]TensorSpec, error) {
	var p problems
	if l.Rank < 1 {
		p.addf("rank %d, want at least 1", l.Rank)
	}
	if !(l.Alpha > 0) || math.IsInf(l.Alpha, 0) {
		p.addf("alpha %g, want a number above 0", l.Alpha)
	}
	if len(l.Targets) == 0 {
		p.addf("no targets, want some of %s", strings.Join(cfg.LinearNames(), ", "))
	}
	all := cfg.linears()
	chosen := make([]bool, len(all))
	for _, target := range l.Targets {
		hit := false
		for i, t := range all {
			if target == AllLinear || endsIn(moduleOf(t.Name), target) {
				chosen[i], hit = true, true
			}
		}
		if !hit {
			p.addf("target %q is no linear layer of this model, which has %s; %s is all of them", target, strings.Join(cfg.LinearNames(), ", "), AllLinear)
		}
	}
	if len(p) > 0 {
		return nil, &Error{Op: "choose LoRA targets", Err: p.err(), Hint: `e.g. rank 16, alpha 32, targets ["all-linear"]`}
	}
	var out []TensorSpec
	for i, t := range all {
		if chosen[i] {
			out = append(out, t)
		}
	}
	return out, nil
}

// linears lists the matrices inside the layers.
func (c *Config) linears() []TensorSpec {
	return slices.DeleteFunc(c.Tensors(), func(t TensorSpec) bool { return len(t.Shape) != 2 || t.Name == EmbedName || t.Name == lmHead })
}

// LinearNames lists the names of the linear layers that a LoRA adapter can target, each once, in table order.
func (c *Config) LinearNames() []string {
	var out []string
	for _, t := range c.linears() {
		m := moduleOf(t.Name)
		if name := m[strings.LastIndexByte(m, '.')+1:]; !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}

// moduleOf is the module of a weight: its name without .weight.
func moduleOf(weight string) string { return strings.TrimSuffix(weight, ".weight") }

// endsIn reports whether the last parts of a dotted name are tail.
func endsIn(name, tail string) bool {
	return name == tail || strings.HasSuffix(name, "."+tail)
}

// Names of an adapter's tensors, after the module's.
const (
	loraA = ".lora_A.weight"
	loraB = ".lora_B.weight"
)

// adapterTensors lists A [rank, in] and B [out, rank] of every matrix.
func adapterTensors(matrices []TensorSpec, rank int) []TensorSpec {
	var out []TensorSpec
	for _, t := range matrices {
		m := moduleOf(t.Name)
		out = append(out, TensorSpec{Name: m + loraA, Shape: []int{rank, t.Shape[1]}}, TensorSpec{Name: m + loraB, Shape: []int{t.Shape[0], rank}})
	}
	return out
}

// Tensors lists the adapter's tensors for cfg: A [rank, in] and B [out, rank] of every adapted matrix.
func (l LoRA) Tensors(cfg *Config) ([]TensorSpec, error) {
	ms, err := l.Matrices(cfg)
	if err != nil {
		return nil, err
	}
	return adapterTensors(ms, l.Rank), nil
}
