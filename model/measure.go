package model

import (
	"fmt"
	"math/rand/v2"
	"strings"

	"harness-s/kernels"
)

// What benchmarks need: weights and contexts of any size without computing them.

// blockElems is the length of the random block that stands for a tensor's values: a prime, so that equal rows are far apart.
const blockElems = 1<<20 - 3

// NewMeasured makes a model to measure with: small tensors as NewRandom draws them, every matrix one block of normal values of deviation
// 0.02 over and over. Weights, and the lower halves of split ones, are exact bfloat16 numbers. Host memory stays at a few MiB, and making one
// takes as long as copying its bytes to the device.
func NewMeasured(cfg *Config, dev *kernels.Device, seed uint64, o LoadOptions) (*Model, error) {
	m, err := newBlank(cfg, dev, o)
	if err != nil {
		return nil, err
	}
	if err := m.Params.measured(seed); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

func (p *Params) measured(seed uint64) error {
	block, err := encodedBlock(seed, p.DType)
	if err != nil {
		return err
	}
	size, at := int64(p.DType.Size()), int64(0)
	for _, e := range p.entries {
		if len(e.Shape) == 1 || strings.HasSuffix(e.Name, "conv1d.weight") {
			v := make([]float32, e.Len)
			initial(e, seed, 0.02)(v)
			if err := p.upload(p.stream, Weights, e, 0, v); err != nil {
				return err
			}
			continue
		}
		for first := int64(0); first < e.Len; {
			n := min(e.Len-first, blockElems-at)
			p.stream.Upload(p.at(Weights, e, first), block[at*size:(at+n)*size])
			first, at = first+n, (at+n)%blockElems
		}
	}
	if err := p.stream.Sync(); err != nil {
		return fmt.Errorf("fill weights: %w", err)
	}
	return nil
}

// encodedBlock are blockElems normal values of deviation 0.02, as bfloat16 numbers in type t.
func encodedBlock(seed uint64, t kernels.DType) ([]byte, error) {
	rng := rand.New(rand.NewPCG(seed, 11))
	v := make([]float32, blockElems)
	for i := range v {
		v[i] = kernels.FromBF16(kernels.ToBF16(float32(0.02 * rng.NormFloat64())))
	}
	b := make([]byte, len(v)*t.Size())
	return b, EncodeFloat32(b, fileDType(t), v)
}

// Pretend advances sequences by n tokens each without computing them: their pages hold random keys and values, their states random numbers,
// so that what follows costs what it would after those tokens and means nothing. Errors: ErrNoPages.
func (r *Runner) Pretend(ids []SeqID, n int, seed uint64) error {
	c, first, extra := r.cache, make([]int, len(ids)), make([]int, len(ids))
	for i, id := range ids {
		s, err := c.seq(id)
		if err != nil {
			return err
		}
		first[i], extra[i] = len(s.pages), n
	}
	if err := c.grow(ids, extra); err != nil {
		return err
	}
	fill, done, err := r.filler(seed)
	if err != nil {
		return err
	}
	defer done()
	for i, id := range ids {
		s := &c.seqs[id]
		s.len += n
		for _, l := range c.layers {
			if l.k == 0 {
				fill(l.rec+kernels.Ptr(int64(id)*c.recBytes()), c.recBytes(), r.dt.Wide())
				fill(l.conv+kernels.Ptr(int64(id)*c.convBytes()), c.convBytes(), r.dt)
				continue
			}
			for pages := s.pages[first[i]:]; len(pages) > 0; {
				k := 1 // pages that lie one after the other
				for k < len(pages) && pages[k] == pages[0]+int32(k) {
					k++
				}
				at, bytes := kernels.Ptr(int64(pages[0])*c.pageBytes()), int64(k)*c.pageBytes()
				fill(l.k+at, bytes, r.dt)
				fill(l.v+at, bytes, r.dt)
				pages = pages[k:]
			}
		}
	}
	if err := r.st.Sync(); err != nil {
		return fmt.Errorf("fill caches: %w", err)
	}
	return nil
}

// filler returns a function that fills memory with values of the runner's type, or what that is never stored below, from a random block.
func (r *Runner) filler(seed uint64) (fill func(dst kernels.Ptr, bytes int64, t kernels.DType), done func(), err error) {
	blocks := map[kernels.DType]*kernels.Buffer{}
	done = func() {
		for _, b := range blocks {
			b.Free()
		}
	}
	for _, t := range []kernels.DType{r.dt, r.dt.Wide()} {
		if blocks[t] != nil {
			continue
		}
		v, err := encodedBlock(seed, t)
		if err != nil {
			done()
			return nil, nil, err
		}
		if blocks[t], err = r.m.Dev.Alloc(int64(len(v)), "random block"); err != nil {
			done()
			return nil, nil, err
		}
		r.st.Upload(blocks[t].Ptr(), v)
	}
	return func(dst kernels.Ptr, bytes int64, t kernels.DType) {
		for left := bytes / int64(t.Size()); left > 0; {
			n := min(left, blockElems)
			r.st.Copy(&kernels.VecArgs{DType: t, N: n, Src: blocks[t].Ptr(), Dst: dst})
			dst, left = dst+kernels.Ptr(n*int64(t.Size())), left-n
		}
	}, done, nil
}
