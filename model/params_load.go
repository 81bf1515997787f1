package model

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"harness-s/kernels"
)

// loadPiece is how many elements of a tensor a worker holds in host memory at a time.
const loadPiece = 1 << 20

// loadWorkers bounds how many pieces are decoded at the same time: beyond this, memory bandwidth is the limit.
const loadWorkers = 8

// parallel calls do(0) to do(n-1) from several goroutines, in ascending order of their beginning. start gives each goroutine its own do,
// and end, which runs when the goroutine is through. After an error no further calls begin; the error of the lowest index comes back.
func parallel(n int, start func() (do func(i int) error, end func())) error {
	var (
		next   atomic.Int64
		failed atomic.Bool
		mu     sync.Mutex
		first  = n
		err    error
		wg     sync.WaitGroup
	)
	for range min(runtime.GOMAXPROCS(0), loadWorkers, n) {
		wg.Go(func() {
			do, end := start()
			defer end()
			for !failed.Load() {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if e := do(i); e != nil {
					failed.Store(true)
					mu.Lock()
					if i < first {
						first, err = i, e
					}
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	return err
}

// extent is a run of elements of a tensor.
type extent struct {
	entry int
	at, n int64
}

// extents cuts the tensors into runs of at most size elements.
func (p *Params) extents(size int64) (out []extent) {
	for i, e := range p.entries {
		for at := int64(0); at < e.Len; at += size {
			out = append(out, extent{i, at, min(size, e.Len-at)})
		}
	}
	return out
}

// load copies a checkpoint's weights to the device in pieces, several at a time. Each worker holds one piece in float32, and once more in
// the arena's dtype when that is another; mapped pages go back to the kernel after each piece. With check, every tensor with a value that
// is not finite is reported, by its first one.
func (p *Params) load(c *Checkpoint, check bool) error {
	ts := make([]NamedTensor, len(p.entries))
	for i, e := range p.entries {
		var err error
		if ts[i], err = c.Tensor(e.Name); err != nil {
			return err
		}
	}
	var mu sync.Mutex
	first := map[int]extent{} // of each faulty tensor, its first faulty piece
	fault := map[int]error{}
	ps := p.extents(loadPiece)
	err := parallel(len(ps), func() (func(int) error, func()) {
		stream := p.dev.NewStream()
		buf := make([]float32, min(loadPiece, p.elems))
		return func(i int) error {
			at, e := ps[i], p.entries[ps[i].entry]
			t, v := ts[at.entry], buf[:at.n]
			size := int64(dtypeBytes(t.DType))
			src := t.Data[at.at*size : (at.at+at.n)*size]
			if err := DecodeFloat32(v, t.DType, src); err != nil {
				return fmt.Errorf("decode tensor %q: %w", e.Name, err)
			}
			c.release(e.Name, src)
			if check {
				if err := checkFinite(e.Name, e.Shape, v, at.at); err != nil {
					mu.Lock()
					defer mu.Unlock()
					if old, ok := first[at.entry]; !ok || at.at < old.at {
						first[at.entry], fault[at.entry] = at, err
					}
					return nil
				}
			}
			return p.upload(stream, Weights, e, at.at, v)
		}, stream.Close
	})
	if err != nil || len(fault) == 0 {
		return err
	}
	var bad problems
	for i := range p.entries {
		if err := fault[i]; err != nil {
			bad = append(bad, err)
		}
	}
	return &Error{Op: "load weights", Err: errors.Join(bad...), Hint: "the checkpoint is damaged or its training diverged; use another one"}
}

// upload writes elements of a tensor, from element at on, of weights both halves.
func (p *Params) upload(s *kernels.Stream, kind StateKind, e Entry, at int64, v []float32) (err error) {
	if kind == Weights && p.split(e) {
		err = p.uploadSplit(s, e, at, v)
	} else {
		s.UploadReal(p.at(kind, e, at), v, p.storage(kind, e))
		err = s.Sync()
	}
	if err != nil {
		return fmt.Errorf("write %s %q: %w", kind, e.Name, err)
	}
	return nil
}

// draw fills the weights with the values of NewRandom, one tensor per goroutine, in pieces.
func (p *Params) draw(seed uint64, std float64) error {
	return parallel(len(p.entries), func() (func(int) error, func()) {
		stream := p.dev.NewStream()
		buf := make([]float32, min(loadPiece, p.elems))
		return func(i int) error {
			e := p.entries[i]
			next := initial(e, seed, std)
			for at := int64(0); at < e.Len; at += loadPiece {
				v := buf[:min(loadPiece, e.Len-at)]
				next(v)
				if err := p.upload(stream, Weights, e, at, v); err != nil {
					return err
				}
			}
			return nil
		}, stream.Close
	})
}
