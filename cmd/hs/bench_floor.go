package main

import "harness-s/model"

// ceilings are what a device reached in this run: the rates that floors are counted in.
type ceilings struct {
	CopyBytesPerS float64 `json:"copy_bytes_per_s"` // bytes read and written by a large copy
	GemmFLOPS     float64 `json:"gemm_flops"`       // the better of the products below
	Gemm          string  `json:"gemm"`             // which product, and at what size
}

// Floors: the least time of work on a device with those ceilings (gpu.md 3). B sequences, c tokens of context, T tokens.

// floorShape are the numbers of a model that floors are made of; elem is the bytes of a stored weight or activation.
type floorShape struct {
	body, head           float64 // parameters that each token multiplies with: of the layers, of the head
	layers, full, linear float64
	kvToken              float64 // bytes of keys and values of a token, all layers
	state, conv          float64 // bytes of a sequence's recurrent and convolution states, all layers
	vocab                float64
	elem                 float64
	attnToken            float64 // operations of a token's attention per token that it sees, all layers
	gdnToken             float64 // operations of a token in the chunked delta rule, all layers
}

// gdnFLOPs are those of a token in one layer of 32 value heads of 128 x 128, in chunks of 64 (gpu.md 6.4).
const gdnFLOPs = 5.85e6

func shapeOf(c *model.Config, elem int) floorShape {
	head := float64(c.VocabSize) * float64(c.Hidden)
	linear, full := float64(c.NumLinear()), float64(c.NumFull())
	return floorShape{
		body: float64(c.MatmulParams()) - head + linear*float64(c.ConvKernel*c.ConvChannels()), head: head,
		layers: float64(len(c.LayerTypes)), full: full, linear: linear,
		kvToken: float64(c.KVBytesPerToken(elem)), state: float64(c.RecurrentBytes(4)), conv: float64(c.ConvBytes(elem)),
		vocab: float64(c.VocabSize), elem: float64(elem),
		attnToken: full * 4 * float64(c.NumHeads*c.HeadDim),
		gdnToken:  linear * gdnFLOPs * float64(c.LinValueHeads*c.LinKeyDim*c.LinValueDim) / (32 * 128 * 128),
	}
}

// decodeForm is what a decode step does with states and logits.
type decodeForm struct {
	replay bool // states are written every 16 tokens, with a ring of the tokens since (gpu.md 3.2); else in every step
	logits bool // stored and read again
}

// replayTraffic is what a step moves of a state with a replay ring: a read, a sixteenth of a write, and the ring, 2.5 MB beside the 50.33 MB
// of the released shapes (gpu.md 3.2).
const replayTraffic = 1 + 1.0/16 + 2.5/50.33

// decode is the seconds of one step of B sequences at context c: products, keys and values, states, logits (gpu.md 3.3).
func (s floorShape) decode(x ceilings, B, c float64, f decodeForm) float64 {
	n := s.body + s.head
	t := max(s.elem*n/x.CopyBytesPerS, 2*n*B/x.GemmFLOPS)
	t += B * c * s.kvToken / x.CopyBytesPerS
	state := 2 * s.state
	if f.replay {
		state = replayTraffic * s.state
	}
	t += B * (state + 4.0/3*s.conv) / x.CopyBytesPerS
	if f.logits {
		t += 8 * s.vocab * B / x.CopyBytesPerS
	}
	return t
}

// prefillFLOPs are those of a token of a prompt of T tokens (gpu.md 3.4); the head runs on the last token alone.
func (s floorShape) prefillFLOPs(T float64) float64 { return 2*s.body + s.attnToken*T/2 + s.gdnToken }

// usefulFLOPs are those of a token of a training row of T tokens: forward and backward, the head on every token (gpu.md 3.5).
func (s floorShape) usefulFLOPs(T float64) float64 {
	return 6*s.body + 3.5*s.attnToken*T/2 + 3.5*s.gdnToken + 6*s.head
}

// hardwareFLOPs are usefulFLOPs and one more forward pass of the layers when they are recomputed.
func (s floorShape) hardwareFLOPs(T float64, recompute bool) float64 {
	f := s.usefulFLOPs(T)
	if recompute {
		f += s.prefillFLOPs(T)
	}
	return f
}

// scoreFLOPs are those of a token whose log-prob is computed and nothing else.
func (s floorShape) scoreFLOPs(T float64) float64 { return s.prefillFLOPs(T) + 2*s.head }

// stepFloor are the seconds of the phases of a GRPO step (gpu.md 3.6): a prompt computed once per group in sampling and in training, all new
// tokens in full batches of B at the mean context, training without recompute.
type stepFloor struct{ Prefill, Decode, Train float64 }

func (s floorShape) step(x ceilings, groups, attempts, prompt, fresh, B float64, f decodeForm) stepFloor {
	tokens := groups * attempts * fresh
	return stepFloor{
		Prefill: groups * prompt * s.prefillFLOPs(prompt) / x.GemmFLOPS,
		Decode:  tokens / B * s.decode(x, B, prompt+fresh/2, f),
		Train:   (tokens + groups*prompt) * s.usefulFLOPs(prompt+fresh) / x.GemmFLOPS,
	}
}
