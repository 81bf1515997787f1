package model

import "fmt"

// LayerName returns the text-only tensor name of a layer's tensor, such as LayerName(3, "self_attn.q_proj.weight").
func LayerName(layer int, suffix string) string {
	return fmt.Sprintf("model.layers.%d.%s", layer, suffix)
}

// Names of the tensors outside the layers.
const (
	EmbedName = "model.embed_tokens.weight"
	NormName  = "model.norm.weight"
	lmHead    = "lm_head.weight"
)

// HeadName returns the tensor that computes the logits: the embedding when tied, else lm_head.
func (c *Config) HeadName() string {
	if c.TieEmbeddings {
		return EmbedName
	}
	return lmHead
}

// Tensors lists all parameters in the order of the arena: embedding, layers, final norm, head. Names and shapes are those of a
// text-only Hugging Face checkpoint (model.md 2.2).
func (c *Config) Tensors() []TensorSpec {
	ts := []TensorSpec{{Name: EmbedName, Shape: []int{c.VocabSize, c.Hidden}}}
	for i, t := range c.LayerTypes {
		add := func(suffix string, f32 bool, shape ...int) {
			ts = append(ts, TensorSpec{Name: LayerName(i, suffix), Shape: shape, KeepF32: f32})
		}
		h := c.Hidden
		add("input_layernorm.weight", false, h)
		if t == FullAttention {
			qd, kd := c.NumHeads*c.HeadDim, c.NumKVHeads*c.HeadDim
			add("self_attn.q_proj.weight", false, 2*qd, h)
			add("self_attn.k_proj.weight", false, kd, h)
			add("self_attn.v_proj.weight", false, kd, h)
			add("self_attn.o_proj.weight", false, h, qd)
			add("self_attn.q_norm.weight", false, c.HeadDim)
			add("self_attn.k_norm.weight", false, c.HeadDim)
		} else {
			nv, vd := c.LinValueHeads, c.ValueDim()
			add("linear_attn.in_proj_qkv.weight", false, c.ConvChannels(), h)
			add("linear_attn.in_proj_z.weight", false, vd, h)
			add("linear_attn.in_proj_b.weight", false, nv, h)
			add("linear_attn.in_proj_a.weight", false, nv, h)
			add("linear_attn.conv1d.weight", false, c.ConvChannels(), 1, c.ConvKernel)
			add("linear_attn.A_log", true, nv)
			add("linear_attn.dt_bias", false, nv)
			add("linear_attn.norm.weight", true, c.LinValueDim)
			add("linear_attn.out_proj.weight", false, h, vd)
		}
		add("post_attention_layernorm.weight", false, h)
		add("mlp.gate_proj.weight", false, c.Intermediate, h)
		add("mlp.up_proj.weight", false, c.Intermediate, h)
		add("mlp.down_proj.weight", false, h, c.Intermediate)
	}
	ts = append(ts, TensorSpec{Name: NormName, Shape: []int{c.Hidden}})
	if !c.TieEmbeddings {
		ts = append(ts, TensorSpec{Name: lmHead, Shape: []int{c.VocabSize, c.Hidden}})
	}
	return ts
}

// NumParams returns the number of parameters; a tied head counts once.
func (c *Config) NumParams() int64 {
	var n int64
	for _, t := range c.Tensors() {
		n += t.Elems()
	}
	return n
}

// PublishedBytes returns the tensor bytes of a published checkpoint: bfloat16, and float32 where KeepF32 (model.md 1.5).
func (c *Config) PublishedBytes() int64 {
	var n int64
	for _, t := range c.Tensors() {
		n += 2 * t.Elems()
		if t.KeepF32 {
			n += 2 * t.Elems()
		}
	}
	return n
}

// MatmulParams returns the parameters that each token multiplies with: all matrices including the head (tied or not) but not the
// embedding lookup.
func (c *Config) MatmulParams() int64 {
	var n int64
	for _, t := range c.Tensors() {
		if len(t.Shape) == 2 && (t.Name != EmbedName || c.TieEmbeddings) {
			n += t.Elems()
		}
	}
	return n
}

// ForwardFLOPs returns the floating-point operations of one token at the given context length (tokens it attends to): two per matrix
// parameter; 4*heads*head_dim*context per full layer; 7*dk*dv per value head (decay, read, rank-1 update, output; model.md 3.5) and the
// convolution per linear layer. A training step costs three times as much.
func (c *Config) ForwardFLOPs(context int) float64 {
	f := 2 * float64(c.MatmulParams())
	f += float64(c.NumFull()) * 4 * float64(c.NumHeads*c.HeadDim) * float64(context)
	f += float64(c.NumLinear()) * (7*float64(c.LinValueHeads*c.LinKeyDim*c.LinValueDim) + 2*float64(c.ConvKernel*c.ConvChannels()))
	return f
}

// KVBytesPerToken returns the bytes of keys and values of one token over all full layers, with elemBytes per element (model.md 4).
func (c *Config) KVBytesPerToken(elemBytes int) int64 {
	return int64(c.NumFull()) * 2 * int64(c.NumKVHeads*c.HeadDim) * int64(elemBytes)
}

// RecurrentBytes returns the bytes of one sequence's recurrent states over all linear layers (model.md 4).
func (c *Config) RecurrentBytes(elemBytes int) int64 {
	return int64(c.NumLinear()) * int64(c.LinValueHeads*c.LinKeyDim*c.LinValueDim) * int64(elemBytes)
}

// ConvBytes returns the bytes of one sequence's convolution windows (kernel-1 columns) over all linear layers (model.md 4).
func (c *Config) ConvBytes(elemBytes int) int64 {
	return int64(c.NumLinear()) * int64((c.ConvKernel-1)*c.ConvChannels()) * int64(elemBytes)
}
