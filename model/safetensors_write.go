package model

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"harness-s/kernels"
)

// Names of the files of a checkpoint directory.
const (
	configFile  = "config.json"
	weightsFile = "model.safetensors"
	indexFile   = "model.safetensors.index.json"
)

// source is a tensor to write; write produces its bytes when its turn comes, so that a whole model never lies twice in host memory.
type source struct {
	name, dtype string
	shape       []int
	bytes       int64
	write       func(io.Writer) error
}

// view is a source whose bytes are at hand, such as those of a mapped file.
func view(t NamedTensor) source {
	return source{t.Name, t.DType, t.Shape, int64(len(t.Data)), func(w io.Writer) error {
		_, err := w.Write(t.Data)
		return err
	}}
}

// source is view for a tensor of a mapped file: pieces that were written do not stay in memory.
func (s *Safetensors) source(t NamedTensor) source {
	v := view(t)
	v.write = func(w io.Writer) error {
		for b := range slices.Chunk(t.Data, 4*savePiece) {
			if _, err := w.Write(b); err != nil {
				return err
			}
			s.release(b)
		}
		return nil
	}
	return v
}

func sources(ts []NamedTensor) []source {
	out := make([]source, len(ts))
	for i, t := range ts {
		out[i] = view(t)
	}
	return out
}

// WriteSafetensors writes one file atomically: a temporary file in the same directory, fsync, rename, fsync of the directory.
func WriteSafetensors(path string, ts []NamedTensor, meta map[string]string) error {
	return writeSafetensors(path, sources(ts), meta)
}

func writeSafetensors(path string, ts []source, meta map[string]string) error {
	o, err := safetensorsFile(filepath.Base(path), ts, meta)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return writeAtomic(path, o.fill)
}

// safetensorsFile is a weight file to write.
func safetensorsFile(name string, ts []source, meta map[string]string) (output, error) {
	head, err := encodeHeader(ts, meta)
	return output{name, func(w io.Writer) error {
		if _, err := w.Write(head); err != nil {
			return err
		}
		for _, t := range ts {
			n := counter{w: w}
			if err := t.write(&n); err != nil {
				return fmt.Errorf("tensor %q: %w", t.name, err)
			}
			if n.bytes != t.bytes {
				return fmt.Errorf("tensor %q: %d bytes, header says %d", t.name, n.bytes, t.bytes)
			}
		}
		return nil
	}}, err
}

// counter counts what passes through to w.
type counter struct {
	w     io.Writer
	bytes int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.bytes += int64(n)
	return n, err
}

// encodeHeader returns the length word and the JSON header, padded with spaces so that the data start at a multiple of 8.
func encodeHeader(ts []source, meta map[string]string) ([]byte, error) {
	var b strings.Builder
	b.WriteByte('{')
	comma := func() {
		if b.Len() > 1 {
			b.WriteByte(',')
		}
	}
	if meta != nil {
		m, err := json.Marshal(meta)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&b, `"__metadata__":%s`, m)
	}
	seen := map[string]bool{}
	at := int64(0)
	for _, t := range ts {
		if seen[t.name] || t.name == "__metadata__" {
			return nil, fmt.Errorf("tensor name %q is used twice or reserved", t.name)
		}
		seen[t.name] = true
		if size := dtypeBytes(t.dtype); size == 0 || int64(size)*elems(t.shape) != t.bytes {
			return nil, fmt.Errorf("tensor %q: %s %v does not hold %d bytes", t.name, t.dtype, t.shape, t.bytes)
		}
		name, err := json.Marshal(t.name)
		if err != nil {
			return nil, err
		}
		shape, err := json.Marshal(append([]int{}, t.shape...))
		if err != nil {
			return nil, err
		}
		comma()
		fmt.Fprintf(&b, `%s:{"dtype":%q,"shape":%s,"data_offsets":[%d,%d]}`, name, t.dtype, shape, at, at+t.bytes)
		at += t.bytes
	}
	b.WriteByte('}')
	for b.Len()%8 != 0 {
		b.WriteByte(' ')
	}
	head := binary.LittleEndian.AppendUint64(nil, uint64(b.Len()))
	return append(head, b.String()...), nil
}

// writeAtomic writes a file so that path holds either the old or the complete new content.
func writeAtomic(path string, fill func(io.Writer) error) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*.tmp")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	w := bufio.NewWriterSize(f, 1<<20)
	if err := fill(w); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

// syncDir makes a rename durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

// WriteCheckpoint writes config.json, model.safetensors and SHA256SUMS to dir, which appears complete or not at all; an existing
// checkpoint there is replaced as a whole.
func WriteCheckpoint(dir string, cfgJSON []byte, tensors []NamedTensor) error {
	return writeCheckpoint(dir, map[string][]byte{configFile: cfgJSON}, sources(tensors), 0)
}

// WriteCheckpointSharded is WriteCheckpoint with several weight files of at most maxShardBytes of tensor data each (a larger single
// tensor gets its own file) and model.safetensors.index.json.
func WriteCheckpointSharded(dir string, cfgJSON []byte, tensors []NamedTensor, maxShardBytes int64) error {
	if maxShardBytes < 1 {
		return fmt.Errorf("write checkpoint: shard limit %d, want >= 1 byte", maxShardBytes)
	}
	return writeCheckpoint(dir, map[string][]byte{configFile: cfgJSON}, sources(tensors), maxShardBytes)
}

func writeCheckpoint(dir string, files map[string][]byte, ts []source, maxShard int64) error {
	outs, err := checkpointFiles(files, ts, maxShard)
	if err != nil {
		return fmt.Errorf("write checkpoint: %w", err)
	}
	return writeDir(dir, outs, nil)
}

// checkpointFiles lists the files of a checkpoint: small ones by name, then the weights.
func checkpointFiles(files map[string][]byte, ts []source, maxShard int64) ([]output, error) {
	var outs []output
	for _, name := range slices.Sorted(maps.Keys(files)) {
		outs = append(outs, content(name, files[name]))
	}
	weights, err := shardFiles(ts, maxShard)
	return append(outs, weights...), err
}

// shardFiles lists the weight files: one, without an index, when all fits into maxShard or that is 0.
func shardFiles(ts []source, maxShard int64) (outs []output, err error) {
	meta := map[string]string{"format": "pt"}
	var total int64
	for _, t := range ts {
		total += t.bytes
	}
	if maxShard == 0 || total <= maxShard {
		o, err := safetensorsFile(weightsFile, aligned(ts), meta)
		return []output{o}, err
	}
	var shards [][]source
	var size int64
	for _, t := range ts {
		if len(shards) == 0 || size > 0 && size+t.bytes > maxShard {
			shards, size = append(shards, nil), 0
		}
		shards[len(shards)-1] = append(shards[len(shards)-1], t)
		size += t.bytes
	}
	index := struct {
		Metadata  map[string]int64  `json:"metadata"`
		WeightMap map[string]string `json:"weight_map"`
	}{map[string]int64{"total_size": total}, map[string]string{}}
	for i, shard := range shards {
		o, err := safetensorsFile(fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(shards)), aligned(shard), meta)
		if err != nil {
			return nil, err
		}
		outs = append(outs, o)
		for _, t := range shard {
			index.WeightMap[t.name] = o.name
		}
	}
	b, err := json.MarshalIndent(index, "", "  ")
	return append(outs, content(indexFile, append(b, '\n'))), err
}

// aligned orders tensors by falling element size, else as they come, so that each starts at a multiple of its element size, as the
// reference writer lays them out: a reader that maps the file then makes no unaligned access.
func aligned(ts []source) []source {
	ts = slices.Clone(ts)
	slices.SortStableFunc(ts, func(a, b source) int { return dtypeBytes(b.dtype) - dtypeBytes(a.dtype) })
	return ts
}

// EncodeFloat32 is the inverse of DecodeFloat32: BF16 and F16 are rounded to nearest even.
func EncodeFloat32(dst []byte, dtype string, src []float32) error {
	if size := dtypeBytes(dtype); size == 0 || len(dst) != size*len(src) {
		return fmt.Errorf("%d bytes for %d elements of %q", len(dst), len(src), dtype)
	}
	le := binary.LittleEndian
	switch dtype {
	case "F32":
		for i, x := range src {
			le.PutUint32(dst[4*i:], math.Float32bits(x))
		}
	case "BF16":
		kernels.ToBF16s(dst, src)
	case "F16":
		for i, x := range src {
			le.PutUint16(dst[2*i:], floatToHalf(x))
		}
	case "F64":
		for i, x := range src {
			le.PutUint64(dst[8*i:], math.Float64bits(float64(x)))
		}
	default:
		return fmt.Errorf("dtype %s is not a floating-point type written here", dtype)
	}
	return nil
}

// floatToHalf rounds to the nearest IEEE half, ties to even; NaN stays a quiet NaN with its sign.
func floatToHalf(f float32) uint16 {
	b := math.Float32bits(f)
	sign, abs := uint16(b>>16)&0x8000, b&0x7fffffff
	switch {
	case abs > 0x7f800000:
		return sign | 0x7e00
	case abs >= 0x477ff000: // 65520 and above
		return sign | 0x7c00
	case abs < 0x38800000: // below 2^-14: a multiple of 2^-24
		return sign | uint16(math.RoundToEven(float64(math.Float32frombits(abs))*(1<<24)))
	}
	abs -= 0x38000000 // exponent bias 127 to 15
	return sign | uint16((abs+0xfff+abs>>13&1)>>13)
}
