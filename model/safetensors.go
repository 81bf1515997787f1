package model

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"os"
	"slices"
	"unicode/utf8"
	"unsafe"

	"golang.org/x/sys/unix"
	"gorgonia.org/tensor"
)

// Limits on a safetensors header; published checkpoints stay far below (9B: 775 tensors in 4 files).
const (
	maxHeaderBytes = 100 << 20
	maxTensors     = 1 << 20
	maxRank        = 16
)

// NamedTensor is one tensor of a safetensors file: row-major, little-endian. Data is a view of the file when read.
type NamedTensor struct {
	Name  string
	DType string // "F32", "BF16", ...
	Shape []int
	Data  []byte
}

// Safetensors is a parsed safetensors file (model.md 2.1).
type Safetensors struct {
	Metadata map[string]string

	tensors []NamedTensor // in file order
	byName  map[string]int
	mapped  []byte
}

// dtypeBytes returns the element size of a safetensors dtype, 0 when unknown.
func dtypeBytes(dtype string) int {
	switch dtype {
	case "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2":
		return 1
	case "I16", "U16", "F16", "BF16":
		return 2
	case "I32", "U32", "F32":
		return 4
	case "I64", "U64", "F64":
		return 8
	}
	return 0
}

// ReadSafetensors maps a file into memory and parses its header. Tensor data are views of the mapping, valid until Close.
func ReadSafetensors(path string) (*Safetensors, error) {
	st, err := os.Stat(path) // before the open, which waits when the path is a pipe
	if err != nil {
		return nil, fmt.Errorf("open safetensors: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("open safetensors: %s is not a file (%s)", path, st.Mode())
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open safetensors: %w", err)
	}
	defer f.Close()
	if st.Size() < 8 {
		return nil, truncated(path, fmt.Errorf("%w: %d bytes, a header needs at least 8", ErrTruncated, st.Size()))
	}
	if st.Size() > math.MaxInt {
		return nil, fmt.Errorf("map %s: %d bytes do not fit this machine's address space", path, st.Size())
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	s, err := ParseSafetensors(data)
	if err != nil {
		unix.Munmap(data)
		return nil, truncated(path, err)
	}
	s.mapped = data
	return s, nil
}

// truncated adds the path and, for a short file, the remedy.
func truncated(path string, err error) error {
	if errors.Is(err, ErrTruncated) {
		return &Error{Op: "read " + path, Err: err, Hint: "fetch the file again and compare its size with the published one"}
	}
	return fmt.Errorf("read %s: %w", path, err)
}

// Close unmaps the file. Views of its tensors must not be used afterwards.
func (s *Safetensors) Close() error {
	if s.mapped == nil {
		return nil
	}
	m := s.mapped
	s.mapped, s.tensors, s.byName = nil, nil, nil
	if err := unix.Munmap(m); err != nil {
		return fmt.Errorf("unmap safetensors: %w", err)
	}
	return nil
}

// releaseUnit is the alignment, in bytes, of the ranges that release gives back: a fault also maps cached pages around it, up to a huge page.
const releaseUnit = 2 << 20

// release gives the mapped pages of b, a view of the file, back to the kernel, so that a file that is read once in order never counts as
// a whole as this process's memory. The data stay readable and come from the page cache or the disk again. Does nothing unless mapped.
func (s *Safetensors) release(b []byte) {
	if s.mapped == nil || len(b) == 0 {
		return
	}
	begin := int(uintptr(unsafe.Pointer(&b[0])) - uintptr(unsafe.Pointer(&s.mapped[0])))
	end := min((begin+len(b)+releaseUnit-1)/releaseUnit*releaseUnit, len(s.mapped))
	begin = begin / releaseUnit * releaseUnit
	_ = unix.Madvise(s.mapped[begin:end], unix.MADV_DONTNEED) // advice: a failure costs memory, not correctness
}

// headerEntry is one tensor in the JSON header.
type headerEntry struct {
	DType   string  `json:"dtype"`
	Shape   []int64 `json:"shape"`
	Offsets []int64 `json:"data_offsets"`
}

// span is where a tensor lies in the data part.
type span struct {
	begin, end int64
	tensor     int
}

// ParseSafetensors parses a whole file held in memory. It never trusts the header: sizes, ranks, products, duplicate names, overlaps and
// offsets are checked; gaps between tensors are tolerated. All faulty tensors are reported at once. Data are views of b.
func ParseSafetensors(b []byte) (*Safetensors, error) {
	if len(b) < 8 {
		return nil, fmt.Errorf("parse safetensors header: %w: %d bytes, want at least 8", ErrTruncated, len(b))
	}
	n := binary.LittleEndian.Uint64(b)
	if n > maxHeaderBytes {
		return nil, fmt.Errorf("parse safetensors header: length %d exceeds the limit of %d bytes; not a safetensors file?", n, maxHeaderBytes)
	}
	if n > uint64(len(b)-8) {
		return nil, fmt.Errorf("parse safetensors header: %w: header of %d bytes in a file of %d", ErrTruncated, n, len(b))
	}
	s := &Safetensors{byName: map[string]int{}}
	entries, err := s.parseHeader(b[8 : 8+n])
	if err != nil {
		return nil, fmt.Errorf("parse safetensors header: %w", err)
	}
	data := b[8+n:]
	var p problems
	var spans []span
	for i, e := range entries {
		if err := s.place(i, e, data); err != nil {
			p = append(p, fmt.Errorf("tensor %q: %w", s.tensors[i].Name, err))
			continue
		}
		if e.Offsets[1] > e.Offsets[0] {
			spans = append(spans, span{e.Offsets[0], e.Offsets[1], i})
		}
	}
	slices.SortFunc(spans, func(a, b span) int {
		if a.begin != b.begin {
			return cmpInt64(a.begin, b.begin)
		}
		return a.tensor - b.tensor
	})
	for i := 1; i < len(spans); i++ {
		if spans[i].begin < spans[i-1].end {
			p.addf("tensors %q [%d,%d) and %q [%d,%d) overlap", s.tensors[spans[i-1].tensor].Name, spans[i-1].begin, spans[i-1].end,
				s.tensors[spans[i].tensor].Name, spans[i].begin, spans[i].end)
		}
	}
	if err := p.err(); err != nil {
		return nil, err
	}
	return s, nil
}

func cmpInt64(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// parseHeader reads the JSON object, keeping order and refusing duplicate names, which encoding/json alone would hide.
func (s *Safetensors) parseHeader(h []byte) ([]headerEntry, error) {
	if !utf8.Valid(h) {
		return nil, errors.New("not UTF-8 text")
	}
	d := json.NewDecoder(bytes.NewReader(h))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, fmt.Errorf("not a JSON object (%v, %v)", t, err)
	}
	var entries []headerEntry
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return nil, err
		}
		name, _ := t.(string)
		if name == "__metadata__" {
			if s.Metadata != nil {
				return nil, fmt.Errorf("two __metadata__ entries")
			}
			if err := d.Decode(&s.Metadata); err != nil {
				return nil, fmt.Errorf("__metadata__: %w", err)
			}
			if s.Metadata == nil {
				s.Metadata = map[string]string{}
			}
			continue
		}
		if _, dup := s.byName[name]; dup {
			return nil, fmt.Errorf("tensor %q appears twice", name)
		}
		if len(entries) == maxTensors {
			return nil, fmt.Errorf("more than %d tensors", maxTensors)
		}
		var e headerEntry
		if err := d.Decode(&e); err != nil {
			return nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		s.byName[name] = len(entries)
		s.tensors = append(s.tensors, NamedTensor{Name: name, DType: e.DType})
		entries = append(entries, e)
	}
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("data after the JSON object at byte %d", d.InputOffset())
	}
	return entries, nil
}

// place checks one entry and sets the tensor's shape and data.
func (s *Safetensors) place(i int, e headerEntry, data []byte) error {
	size := dtypeBytes(e.DType)
	if size == 0 {
		return fmt.Errorf("unknown dtype %q", e.DType)
	}
	if len(e.Shape) > maxRank {
		return fmt.Errorf("rank %d exceeds %d", len(e.Shape), maxRank)
	}
	if len(e.Offsets) != 2 || e.Offsets[0] < 0 || e.Offsets[1] < e.Offsets[0] {
		return fmt.Errorf("data_offsets %v, want [begin, end] with 0 <= begin <= end", e.Offsets)
	}
	want, zero := uint64(size), false
	shape := make([]int, len(e.Shape))
	for k, d := range e.Shape {
		if d < 0 || d > math.MaxInt32 {
			return fmt.Errorf("shape %v: dimension %d outside 0..%d", e.Shape, d, math.MaxInt32)
		}
		shape[k] = int(d)
		if d == 0 {
			zero = true
			continue
		}
		hi, lo := bits.Mul64(want, uint64(d))
		if hi != 0 || lo > math.MaxInt64 {
			return fmt.Errorf("shape %v: size overflows", e.Shape)
		}
		want = lo
	}
	if zero {
		want = 0
	}
	if got := uint64(e.Offsets[1] - e.Offsets[0]); got != want {
		return fmt.Errorf("%s %v needs %d bytes, data_offsets %v hold %d", e.DType, e.Shape, want, e.Offsets, got)
	}
	if e.Offsets[1] > int64(len(data)) {
		return fmt.Errorf("%w: data bytes %d..%d of %d", ErrTruncated, e.Offsets[0], e.Offsets[1], len(data))
	}
	s.tensors[i].Shape = shape
	s.tensors[i].Data = data[e.Offsets[0]:e.Offsets[1]:e.Offsets[1]]
	return nil
}

// Names lists the tensors in header order.
func (s *Safetensors) Names() []string {
	names := make([]string, len(s.tensors))
	for i, t := range s.tensors {
		names[i] = t.Name
	}
	return names
}

// Tensor returns a tensor by name.
func (s *Safetensors) Tensor(name string) (NamedTensor, error) {
	i, ok := s.byName[name]
	if !ok {
		return NamedTensor{}, fmt.Errorf("find tensor %q: not among the %d tensors of the file", name, len(s.tensors))
	}
	return s.tensors[i], nil
}

// Float32s returns the values of a floating-point tensor, row-major.
func (s *Safetensors) Float32s(name string) ([]float32, error) {
	t, err := s.Tensor(name)
	if err != nil {
		return nil, err
	}
	return t.Float32s()
}

// Int64s returns the values of an integer tensor, row-major.
func (s *Safetensors) Int64s(name string) ([]int64, error) {
	t, err := s.Tensor(name)
	if err != nil {
		return nil, err
	}
	return t.Int64s()
}

// Dense returns a copy of a floating-point tensor as a float32 gorgonia tensor of the same shape.
func (s *Safetensors) Dense(name string) (*tensor.Dense, error) {
	t, err := s.Tensor(name)
	if err != nil {
		return nil, err
	}
	return t.Dense()
}

// Float32s decodes F32, BF16, F16 or F64 to float32.
func (t NamedTensor) Float32s() ([]float32, error) {
	out := make([]float32, elems(t.Shape))
	if err := DecodeFloat32(out, t.DType, t.Data); err != nil {
		return nil, fmt.Errorf("decode tensor %q: %w", t.Name, err)
	}
	return out, nil
}

// Int64s decodes I64, I32, I16, I8, U8 or BOOL to int64.
func (t NamedTensor) Int64s() ([]int64, error) {
	out := make([]int64, elems(t.Shape))
	size := dtypeBytes(t.DType)
	if size*len(out) != len(t.Data) {
		return nil, fmt.Errorf("decode tensor %q: %d bytes for %d elements of %s", t.Name, len(t.Data), len(out), t.DType)
	}
	for i := range out {
		b := t.Data[i*size:]
		switch t.DType {
		case "I64":
			out[i] = int64(binary.LittleEndian.Uint64(b))
		case "I32":
			out[i] = int64(int32(binary.LittleEndian.Uint32(b)))
		case "I16":
			out[i] = int64(int16(binary.LittleEndian.Uint16(b)))
		case "I8":
			out[i] = int64(int8(b[0]))
		case "U8", "BOOL":
			out[i] = int64(b[0])
		default:
			return nil, fmt.Errorf("decode tensor %q: dtype %s is not an integer type read here", t.Name, t.DType)
		}
	}
	return out, nil
}

// Dense copies the tensor into a float32 gorgonia tensor. A scalar gets shape [1].
func (t NamedTensor) Dense() (*tensor.Dense, error) {
	v, err := t.Float32s()
	if err != nil {
		return nil, err
	}
	return denseF32(t.Shape, v), nil
}

func denseF32(shape []int, v []float32) *tensor.Dense {
	if len(shape) == 0 {
		shape = []int{1}
	}
	return tensor.New(tensor.WithShape(slices.Clone(shape)...), tensor.WithBacking(v))
}

// DecodeFloat32 decodes len(dst) little-endian elements of a floating-point dtype; F64 is rounded.
func DecodeFloat32(dst []float32, dtype string, src []byte) error {
	size := dtypeBytes(dtype)
	if size == 0 || len(src) != size*len(dst) {
		return fmt.Errorf("%d bytes for %d elements of %q", len(src), len(dst), dtype)
	}
	le := binary.LittleEndian
	switch dtype {
	case "F32":
		for i := range dst {
			dst[i] = math.Float32frombits(le.Uint32(src[4*i:]))
		}
	case "BF16":
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(le.Uint16(src[2*i:])) << 16)
		}
	case "F16":
		for i := range dst {
			dst[i] = halfToFloat(le.Uint16(src[2*i:]))
		}
	case "F64":
		for i := range dst {
			dst[i] = float32(math.Float64frombits(le.Uint64(src[8*i:])))
		}
	default:
		return fmt.Errorf("dtype %s is not a floating-point type read here", dtype)
	}
	return nil
}

// halfToFloat converts an IEEE half, exactly.
func halfToFloat(h uint16) float32 {
	sign, exp, man := uint32(h>>15)<<31, uint32(h>>10)&31, uint32(h)&1023
	switch exp {
	case 31:
		return math.Float32frombits(sign | 0xff<<23 | man<<13)
	case 0:
		f := float32(man) / (1 << 24)
		if sign != 0 {
			f = -f
			if man == 0 {
				return math.Float32frombits(sign)
			}
		}
		return f
	}
	return math.Float32frombits(sign | (exp+112)<<23 | man<<13)
}
