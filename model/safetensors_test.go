package model

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

func f32Bytes(v ...float32) []byte {
	var b []byte
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
	}
	return b
}

func rawFile(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, data)...)
}

func TestSafetensorsRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.safetensors")
	in := []NamedTensor{
		{"b", "F32", []int{2, 2}, f32Bytes(1, 2, 3, 4)},
		{"a", "I64", []int{1}, binary.LittleEndian.AppendUint64(nil, 1<<40)},
		{"half", "F16", []int{5}, []byte{0, 0x3c, 1, 0, 0, 0x7c, 0, 0xc0, 0, 0x80}},
		{"bf", "BF16", []int{1}, []byte{0xc0, 0x3f}},
		{"d", "F64", []int{}, binary.LittleEndian.AppendUint64(nil, math.Float64bits(0.5))},
		{"none", "F32", []int{0, 3}, nil},
	}
	if err := WriteSafetensors(path, in, map[string]string{"format": "pt"}); err != nil {
		t.Fatal(err)
	}
	s, err := ReadSafetensors(path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.Metadata["format"] != "pt" || !slices.Equal(s.Names(), []string{"b", "a", "half", "bf", "d", "none"}) {
		t.Errorf("metadata %v, names %v", s.Metadata, s.Names())
	}
	for name, want := range map[string][]float32{"b": {1, 2, 3, 4}, "half": {1, 1.0 / (1 << 24), float32(math.Inf(1)), -2, 0}, "bf": {1.5}, "d": {0.5}, "none": {}} {
		if got, err := s.Float32s(name); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s = %v, %v", name, got, err)
		}
	}
	if got, err := s.Int64s("a"); err != nil || got[0] != 1<<40 {
		t.Errorf("a = %v, %v", got, err)
	}
	if d, err := s.Dense("b"); err != nil || !slices.Equal(d.Shape(), []int{2, 2}) {
		t.Errorf("dense %v, %v", d, err)
	}
	for _, name := range []string{"a", "no"} {
		if _, err := s.Float32s(name); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".*"))
	if err != nil || len(left) > 0 {
		t.Errorf("temporary files %v, %v", left, err)
	}
}

func TestSafetensorsRefusesHostileHeaders(t *testing.T) {
	for _, tc := range []struct {
		name, header string
		data         int
		want         string
	}{
		{"not json", `[]`, 0, "not a JSON object"},
		{"duplicate", `{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, `tensor "a" appears twice`},
		{"overlap", `{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, 3, "overlap"},
		{"dtype", `{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}`, 1, `unknown dtype "Q4"`},
		{"negative offset", `{"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}}`, 1, "data_offsets"},
		{"backward", `{"a":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}}`, 1, "data_offsets"},
		{"one offset", `{"a":{"dtype":"U8","shape":[1],"data_offsets":[1]}}`, 1, "data_offsets"},
		{"negative dim", `{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}`, 1, "dimension -1"},
		{"overflow", `{"a":{"dtype":"F64","shape":[2147483647,2147483647,4],"data_offsets":[0,1]}}`, 1, "overflows"},
		{"size", `{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, 4, "needs 8 bytes"},
		{"beyond the file", `{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 4, "truncated"},
		{"rank", `{"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}`, 1, "rank 17"},
		{"trailing", `{} {}`, 0, "data after"},
		{"fraction", `{"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}}`, 1, `tensor "a"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := ParseSafetensors(rawFile(tc.header, tc.data))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
	huge := binary.LittleEndian.AppendUint64(nil, math.MaxUint64)
	if _, err := ParseSafetensors(huge); err == nil || !strings.Contains(err.Error(), "limit") {
		t.Errorf("huge header: %v", err)
	}
	for _, b := range [][]byte{nil, {1, 2}, binary.LittleEndian.AppendUint64(nil, 100)} {
		if _, err := ParseSafetensors(b); !errors.Is(err, ErrTruncated) {
			t.Errorf("%d bytes: %v", len(b), err)
		}
	}
	gap := rawFile(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[4,5]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 9)
	if _, err := ParseSafetensors(gap); err != nil {
		t.Errorf("gaps are allowed: %v", err)
	}
	both := rawFile(`{"a":{"dtype":"Q","shape":[],"data_offsets":[0,1]},"b":{"dtype":"R","shape":[],"data_offsets":[0,1]}}`, 1)
	if _, err := ParseSafetensors(both); err == nil || !strings.Contains(err.Error(), `"Q"`) || !strings.Contains(err.Error(), `"R"`) {
		t.Errorf("not all problems: %v", err)
	}
}

// FuzzSafetensors checks that no file breaks the parser and that accepted tensors lie inside it with the size their shape asks for.
func FuzzSafetensors(f *testing.F) {
	f.Add(rawFile(`{"__metadata__":{"a":"b"},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}`, 8))
	f.Add(rawFile(`{"a":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[],"data_offsets":[3,4]}}`, 4))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseSafetensors(b)
		if err != nil {
			return
		}
		for _, name := range s.Names() {
			x, err := s.Tensor(name)
			if err != nil {
				t.Fatal(err)
			}
			if int64(len(x.Data)) != elems(x.Shape)*int64(dtypeBytes(x.DType)) || len(x.Data) > len(b) {
				t.Errorf("tensor %q %v: %d bytes", name, x.Shape, len(x.Data))
			}
		}
	})
}

// checkpointTensors makes the tensors of a small configuration, with a prefix, in a dtype.
func checkpointTensors(cfg *Config, prefix string) []NamedTensor {
	var ts []NamedTensor
	for _, spec := range cfg.Tensors() {
		name := spec.Name
		if prefix != "" {
			name = strings.Replace(name, "model.", prefix, 1)
		}
		v := make([]float32, spec.Elems())
		for i := range v {
			v[i] = float32(len(ts)) + float32(i%7)/8
		}
		ts = append(ts, NamedTensor{name, "F32", spec.Shape, f32Bytes(v...)})
	}
	return ts
}

func smallConfig(tie bool) *Config {
	return &Config{VocabSize: 19, Hidden: 8, Intermediate: 12, NumLayers: 2, NumHeads: 2, NumKVHeads: 1, HeadDim: 4, RotaryDim: 2, RopeTheta: 1e4, RMSEps: 1e-6,
		LinKeyHeads: 1, LinValueHeads: 2, LinKeyDim: 4, LinValueDim: 4, ConvKernel: 4, LayerTypes: layerPattern(2, 2), TieEmbeddings: tie, MaxPositions: 64, InitRange: 0.02}
}

func TestCheckpointLayouts(t *testing.T) {
	for _, tie := range []bool{true, false} {
		cfg := smallConfig(tie)
		for _, prefix := range []string{"", "model.language_model."} {
			ts := checkpointTensors(cfg, prefix)
			ts = append(ts, NamedTensor{"mtp.fc.weight", "F32", []int{1}, f32Bytes(1)}, NamedTensor{"model.visual.x", "U8", []int{1}, []byte{1}})
			for _, shard := range []int64{0, 1, 600, 1 << 20} {
				t.Run(fmt.Sprintf("tie=%v/prefix=%q/shard=%d", tie, prefix, shard), func(t *testing.T) {
					dir := filepath.Join(t.TempDir(), "ckpt")
					var err error
					if shard == 0 {
						err = WriteCheckpoint(dir, cfg.JSON(), ts)
					} else {
						err = WriteCheckpointSharded(dir, cfg.JSON(), ts, shard)
					}
					if err != nil {
						t.Fatal(err)
					}
					c, err := OpenCheckpoint(dir)
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
					if err := c.Check(cfg); err != nil {
						t.Error(err)
					}
					for i, spec := range cfg.Tensors() {
						v, err := c.Float32s(spec.Name)
						if err != nil || v[0] != float32(i) {
							t.Errorf("%s: %v, %v", spec.Name, v[:1], err)
						}
					}
					m, err := OpenCheckpointFS(os.DirFS(dir))
					if err != nil || !slices.Equal(m.Names(), c.Names()) {
						t.Errorf("from a file system: %v", err)
					}
				})
			}
		}
	}
}

func TestCheckpointProblems(t *testing.T) {
	cfg := smallConfig(true)
	ts := checkpointTensors(cfg, "")
	dir := filepath.Join(t.TempDir(), "ckpt")
	if err := WriteCheckpointSharded(dir, cfg.JSON(), ts, 2000); err != nil {
		t.Fatal(err)
	}
	shards, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil || len(shards) < 3 {
		t.Fatal(shards, err)
	}
	t.Run("truncated", func(t *testing.T) {
		b, err := os.ReadFile(shards[0])
		if err != nil {
			t.Fatal(err)
		}
		defer os.WriteFile(shards[0], b, 0o644)
		if err := os.WriteFile(shards[0], b[:len(b)-1], 0o644); err != nil {
			t.Fatal(err)
		}
		_, err = OpenCheckpoint(dir)
		var hint *Error
		if !errors.Is(err, ErrTruncated) || !errors.As(err, &hint) || hint.Hint == "" || !strings.Contains(err.Error(), filepath.Base(shards[0])) || !strings.Contains(err.Error(), "tensor") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("missing shards", func(t *testing.T) {
		for _, s := range shards[1:3] {
			if err := os.Rename(s, s+".away"); err != nil {
				t.Fatal(err)
			}
		}
		_, err := OpenCheckpoint(dir)
		for _, s := range shards[1:3] {
			if err == nil || !strings.Contains(err.Error(), filepath.Base(s)) {
				t.Errorf("%s is not named: %v", s, err)
			}
			if err := os.Rename(s+".away", s); err != nil {
				t.Fatal(err)
			}
		}
	})
	t.Run("foreign path", func(t *testing.T) {
		_, err := OpenCheckpointFS(fstest.MapFS{indexFile: {Data: []byte(`{"weight_map":{"a":"../x","b":"/etc/x","mtp.c":"gone"}}`)}})
		if err == nil || strings.Count(err.Error(), "not a plain file name") != 2 {
			t.Errorf("got %v", err)
		}
	})
	t.Run("nothing", func(t *testing.T) {
		var hint *Error
		if _, err := OpenCheckpointFS(fstest.MapFS{}); !errors.As(err, &hint) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("shapes", func(t *testing.T) {
		bad := slices.Clone(ts)
		bad[0].Shape = []int{8, 19}
		bad[1].Name = "model.extra"
		bad[2] = NamedTensor{bad[2].Name, "U8", bad[2].Shape, make([]byte, elems(bad[2].Shape))}
		if err := WriteCheckpoint(dir, cfg.JSON(), bad); err != nil {
			t.Fatal(err)
		}
		c, err := OpenCheckpoint(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		err = c.Check(cfg)
		for _, want := range []string{"has shape [8 19]", `"model.extra" is not a parameter`, "is missing", "dtype U8"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("missing %q in %v", want, err)
			}
		}
	})
	if err := WriteSafetensors(filepath.Join(dir, "x"), []NamedTensor{{"a", "F32", []int{2}, f32Bytes(1)}}, nil); err == nil {
		t.Error("a tensor with the wrong number of bytes was written")
	}
}

func TestHeaderIsAlignedJSON(t *testing.T) {
	head, err := encodeHeader(sources([]NamedTensor{{`q"<`, "U8", []int{3}, []byte{1, 2, 3}}}), nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(head)%8 != 0 || !json.Valid(bytes.TrimSpace(head[8:])) {
		t.Errorf("header %q", head)
	}
}
