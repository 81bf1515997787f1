package model

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
)

// nestedConfig is a config.json in the form of published checkpoints, for smallConfig.
func nestedConfig(t *testing.T, cfg *Config) string {
	t.Helper()
	var text map[string]any
	if err := json.Unmarshal(cfg.JSON(), &text); err != nil {
		t.Fatal(err)
	}
	delete(text, "architectures")
	text["dtype"] = "bfloat16"
	text["mtp_num_hidden_layers"] = 1
	b, err := json.Marshal(text)
	if err != nil {
		t.Fatal(err)
	}
	tie := "false"
	if cfg.TieEmbeddings {
		tie = "true"
	}
	return `{  "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type":"qwen3_5",
	"text_config" : ` + string(b) + `,
	"tie_word_embeddings": ` + tie + `, "vision_config": {"depth": 1,  "dtype": "bfloat16", "eps": 1e-06}, "future_key": [1.50, null]}` + "\n\n"
}

// stored makes what a published checkpoint holds: text tensors in bfloat16 and float32, a vision tower and an MTP head.
func stored(cfg *Config, prefix string) []NamedTensor {
	ts := []NamedTensor{{"model.visual.patch.bias", "BF16", []int{3}, []byte{1, 2, 3, 0x7f, 0xc1, 0xff}}} // NaN among them
	for i, spec := range cfg.Tensors() {
		v := make([]float32, spec.Elems())
		for k := range v {
			v[k] = float32(i+1) / 16 * float32(k%11-5)
		}
		t := NamedTensor{strings.Replace(spec.Name, "model.", prefix, 1), "F32", spec.Shape, f32Bytes(v...)}
		switch {
		case strings.HasSuffix(spec.Name, "dt_bias"):
			t.DType, t.Data = "F16", make([]byte, 2*len(v))
			EncodeFloat32(t.Data, "F16", v)
		case !spec.KeepF32:
			t.DType, t.Data = "BF16", make([]byte, 2*len(v))
			kernels.ToBF16s(t.Data, v)
		}
		ts = append(ts, t)
	}
	return append(ts, NamedTensor{"mtp.fc.weight", "BF16", []int{2, 2}, []byte{1, 2, 3, 4, 5, 6, 7, 8}},
		NamedTensor{"mtp.scale", "F32", []int{}, f32Bytes(3)}, NamedTensor{"model.visual.index", "I64", []int{2}, make([]byte, 16)})
}

// publish writes tensors in shards with the doubled extension, and the files that come with them.
func publish(t *testing.T, cfgText string, ts []NamedTensor, shards int) string {
	t.Helper()
	dir := t.TempDir()
	index := map[string]string{}
	for i := range shards {
		var part []NamedTensor
		name := strings.Replace("model.safetensors-0000I-of-0000N.safetensors", "I", string(rune('1'+i)), 1)
		name = strings.Replace(name, "N", string(rune('0'+shards)), 1)
		for k, x := range ts {
			if k*shards/len(ts) == i {
				part = append(part, x)
				index[x.Name] = name
			}
		}
		if err := WriteSafetensors(filepath.Join(dir, name), part, nil); err != nil {
			t.Fatal(err)
		}
	}
	b, err := json.Marshal(map[string]any{"metadata": map[string]any{"total_size": 1}, "weight_map": index})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{configFile: cfgText, indexFile: string(b), "preprocessor_config.json": "{ }", "chat_template.jinja": "{{ x }}",
		"LICENSE": "licence", "README.md": "card", "stray.safetensors": "not a weight file", ".hidden.json": "{}"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// readStored returns every tensor of a saved directory by its stored name, and the number of weight files. It checks the index.
func readStored(t *testing.T, dir string) (map[string]NamedTensor, int) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	var index struct {
		Metadata  map[string]int64  `json:"metadata"`
		WeightMap map[string]string `json:"weight_map"`
	}
	b, err := os.ReadFile(filepath.Join(dir, indexFile))
	if err == nil {
		err = json.Unmarshal(b, &index)
	} else if len(files) == 1 && filepath.Base(files[0]) == weightsFile {
		err = nil
	}
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]NamedTensor{}
	var total int64
	for _, f := range files {
		s, err := ReadSafetensors(f)
		if err != nil {
			t.Fatal(err)
		}
		if s.Metadata["format"] != "pt" {
			t.Errorf("%s: metadata %v", f, s.Metadata)
		}
		at := 0
		for _, x := range s.tensors {
			if at%dtypeBytes(x.DType) != 0 {
				t.Errorf("%s: %s starts at byte %d of the data", x.Name, x.DType, at)
			}
			at += len(x.Data)
			if _, dup := out[x.Name]; dup {
				t.Errorf("%s is stored twice", x.Name)
			}
			if at, ok := index.WeightMap[x.Name]; index.WeightMap != nil && (!ok || at != filepath.Base(f)) {
				t.Errorf("%s lies in %s, the index says %q", x.Name, f, at)
			}
			x.Data = bytes.Clone(x.Data)
			out[x.Name] = x
			total += int64(len(x.Data))
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if index.WeightMap != nil && (len(index.WeightMap) != len(out) || index.Metadata["total_size"] != total) {
		t.Errorf("index has %d tensors and %v, files have %d and %d bytes", len(index.WeightMap), index.Metadata, len(out), total)
	}
	return out, len(files)
}

func sameTensors(t *testing.T, got map[string]NamedTensor, want []NamedTensor) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%d tensors, want %d", len(got), len(want))
	}
	for _, w := range want {
		if g := got[w.Name]; g.DType != w.DType || !slices.Equal(g.Shape, w.Shape) || !bytes.Equal(g.Data, w.Data) {
			t.Errorf("%s: %s %v, want %s %v, data equal %v", w.Name, g.DType, g.Shape, w.DType, w.Shape, bytes.Equal(g.Data, w.Data))
		}
	}
}

func TestSaveKeepsTheCheckpoint(t *testing.T) {
	dev := openCPU(t)
	for _, tie := range []bool{true, false} {
		for _, prefix := range []string{"model.language_model.", "model."} {
			cfg := smallConfig(tie)
			ts := stored(cfg, prefix)
			text := nestedConfig(t, cfg)
			extra := ts
			if tie { // an unused copy of the embedding
				extra = append(slices.Clone(ts), NamedTensor{lmHead, "BF16", []int{19, 8}, make([]byte, 19*8*2)})
			}
			src := publish(t, text, extra, 3)
			m, err := Load(src, dev, LoadOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			run := filepath.Join(t.TempDir(), "run") // a run's own checkpoint lies between
			if err := m.Save(run); err != nil {
				t.Fatal(err)
			}
			if m, err = Load(run, dev, LoadOptions{}); err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			m.Files["chat_template.jinja"] = []byte("{{ y }}")

			out := filepath.Join(t.TempDir(), "a", "out")
			if err := m.SaveAs(out, SaveOptions{Keep: src, DType: SaveStored, MaxShardBytes: 700}); err != nil {
				t.Fatal(err)
			}
			got, n := readStored(t, out)
			if n < 3 {
				t.Errorf("%d weight files", n)
			}
			sameTensors(t, got, ts)
			var names []string
			entries, err := os.ReadDir(out)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				if !strings.HasSuffix(e.Name(), ".safetensors") {
					names = append(names, e.Name())
				}
			}
			if !slices.Equal(names, []string{"LICENSE", sumsFile, "chat_template.jinja", configFile, indexFile, "preprocessor_config.json"}) {
				t.Errorf("files %v", names)
			}
			for name, want := range map[string]string{configFile: text, "chat_template.jinja": "{{ y }}", "preprocessor_config.json": "{ }"} {
				if b, err := os.ReadFile(filepath.Join(out, name)); err != nil || string(b) != want {
					t.Errorf("%s is %q (%v)", name, b, err)
				}
			}

			// A step of training changes one tensor of each dtype, and nothing else.
			for _, name := range []string{EmbedName, "model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.dt_bias"} {
				e, _ := m.Params.Lookup(name)
				v := make([]float32, e.Len)
				for i := range v {
					v[i] = 1 + float32(i)/(1<<20)
				}
				v[0], v[1] = 1+3.0/256, 1+1.0/256 // ties in bfloat16: up to even, down to even
				if err := m.Params.WriteF32(Weights, name, v); err != nil {
					t.Fatal(err)
				}
			}
			out2 := t.TempDir() // empty
			if err := m.SaveAs(out2, SaveOptions{Keep: src, DType: SaveStored}); err != nil {
				t.Fatal(err)
			}
			got, n = readStored(t, out2)
			if n != 1 {
				t.Errorf("%d weight files, want one", n)
			}
			changed := 0
			for _, w := range ts {
				if bytes.Equal(got[w.Name].Data, w.Data) {
					continue
				}
				changed++
				if g := got[w.Name]; g.DType != w.DType {
					t.Errorf("%s became %s", w.Name, g.DType)
				}
			}
			embed := got[strings.Replace(EmbedName, "model.", prefix, 1)].Data
			if changed != 3 || !bytes.Equal(embed[:4], []byte{0x82, 0x3f, 0x80, 0x3f}) {
				t.Errorf("%d tensors changed; embedding starts with % x", changed, embed[:4])
			}
			again, err := Load(out2, dev, LoadOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer again.Close()
			a, err := m.Params.ReadF32(Weights, "model.layers.0.linear_attn.A_log")
			if err != nil {
				t.Fatal(err)
			}
			if b, err := again.Params.ReadF32(Weights, "model.layers.0.linear_attn.A_log"); err != nil || !slices.Equal(a, b) {
				t.Errorf("A_log is %v, want %v (%v)", b, a, err)
			}

			// float32 text tensors beside the kept ones: only the dtype of the text changes in config.json.
			out3 := filepath.Join(t.TempDir(), "out")
			if err := m.SaveAs(out3, SaveOptions{Keep: src}); err != nil {
				t.Fatal(err)
			}
			got, _ = readStored(t, out3)
			for _, w := range ts {
				_, isText := textName(w.Name)
				if g := got[w.Name]; isText && g.DType != "F32" || !isText && !bytes.Equal(g.Data, w.Data) {
					t.Errorf("%s is %s", w.Name, g.DType)
				}
			}
			b, err := os.ReadFile(filepath.Join(out3, configFile))
			if want := strings.Replace(text, `"dtype":"bfloat16"`, `"dtype":"float32"`, 1); err != nil || string(b) != want || want == text {
				t.Errorf("config.json is %s (%v)", b, err)
			}
		}
	}
}

func TestSaveKeepingRefuses(t *testing.T) {
	dev := openCPU(t)
	cfg := smallConfig(true)
	ts := stored(cfg, "model.language_model.")
	text := nestedConfig(t, cfg)
	m, err := Load(publish(t, text, ts, 2), dev, LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	save := func(src string, want ...string) {
		t.Helper()
		parent := t.TempDir()
		err := m.SaveAs(filepath.Join(parent, "out"), SaveOptions{Keep: src, DType: SaveStored})
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("missing %q in %v", w, err)
			}
		}
		if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
	}
	save(t.TempDir(), "config.json")
	save(publish(t, strings.NewReplacer(`"rms_norm_eps":0.000001`, `"rms_norm_eps":0.00001`, `"rope_theta":10000`, `"rope_theta":20000`).Replace(text), ts, 2),
		"RMSEps is 1e-05", "RopeTheta is 20000")

	gone := publish(t, text, ts[1:], 2) // the index names a shard that holds a vision tensor alone and is not there
	b, err := os.ReadFile(filepath.Join(gone, indexFile))
	if err != nil {
		t.Fatal(err)
	}
	b = bytes.Replace(b, []byte(`"weight_map":{`), []byte(`"weight_map":{"model.visual.patch.bias":"gone.safetensors",`), 1)
	if err := os.WriteFile(filepath.Join(gone, indexFile), b, 0o644); err != nil {
		t.Fatal(err)
	}
	if loaded, err := Load(gone, dev, LoadOptions{}); err != nil {
		t.Errorf("text without its vision shard: %v", err)
	} else {
		loaded.Close()
	}
	save(gone, "shard gone.safetensors is missing", "model.visual.patch.bias")

	full := t.TempDir()
	if err := os.Mkdir(filepath.Join(full, "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	var hint *Error
	if _, err := m.CheckSave(full, SaveOptions{}); !errors.As(err, &hint) || !strings.Contains(err.Error(), "the folder x") {
		t.Errorf("a folder in the way: %v", err)
	}
	if _, err := m.CheckSave(filepath.Join(full, "new"), SaveOptions{Keep: gone}); err == nil || !strings.Contains(err.Error(), "gone.safetensors") {
		t.Errorf("a damaged original: %v", err)
	}
	if err := m.SaveAs(full, SaveOptions{MaxShardBytes: -1}); err == nil {
		t.Error("negative shard limit was accepted")
	}

	src := publish(t, text, ts, 2)
	for name, tc := range map[string]struct {
		v    float32
		want string
	}{
		EmbedName:                            {math.MaxFloat32, "too large for BF16"},
		"model.layers.0.linear_attn.dt_bias": {65520, "too large for F16"},
		"model.layers.0.linear_attn.A_log":   {float32(math.NaN()), ErrNonFinite.Error()},
	} {
		v, err := m.Params.ReadF32(Weights, name)
		if err != nil {
			t.Fatal(err)
		}
		bad := slices.Clone(v)
		bad[1] = tc.v
		if err := m.Params.WriteF32(Weights, name, bad); err != nil {
			t.Fatal(err)
		}
		save(src, "element 1 is", tc.want, strings.TrimPrefix(name, "model."))
		if err := m.Params.WriteF32(Weights, name, v); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.SaveAs(filepath.Join(t.TempDir(), "out"), SaveOptions{Keep: src, DType: SaveStored}); err != nil {
		t.Error(err)
	}
}

// TestSaveOverItsSource checks that a model can take the place of the checkpoint that it came from and keeps, and that CheckSave, which
// changes nothing, knows the size.
func TestSaveOverItsSource(t *testing.T) {
	dev := openCPU(t)
	cfg := smallConfig(true)
	ts := stored(cfg, "model.language_model.")
	src := publish(t, nestedConfig(t, cfg), ts, 3)
	if err := os.WriteFile(filepath.Join(src, "notes.md"), []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	m, err := Load(src, dev, LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	o := SaveOptions{Keep: src, DType: SaveStored}
	before := dirFiles(t, src)
	size, err := m.CheckSave(src, o)
	if err != nil || !equalFiles(dirFiles(t, src), before) {
		t.Fatalf("CheckSave changed something, or %v", err)
	}
	if err := m.SaveAs(src, o); err != nil {
		t.Fatal(err)
	}
	got, n := readStored(t, src)
	sameTensors(t, got, ts)
	for _, x := range ts {
		size -= int64(len(x.Data))
	}
	after := dirFiles(t, src)
	if n != 1 || size != 0 || after["notes.md"] != "mine" || after[indexFile] != "" {
		t.Errorf("%d weight files, %d bytes too many, files %q", n, size, names(after))
	}
	if left, err := os.ReadDir(filepath.Dir(src)); err != nil || len(left) != 1 {
		t.Errorf("left behind %v (%v)", left, err)
	}
}

func TestSaveTextOnly(t *testing.T) {
	dev := openCPU(t)
	m, err := NewRandom(smallConfig(false), dev, 3, LoadOptions{DType: kernels.F64})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	out := filepath.Join(t.TempDir(), "out")
	if err := m.SaveAs(out, SaveOptions{DType: SaveStored, MaxShardBytes: 500}); err != nil {
		t.Fatal(err)
	}
	got, n := readStored(t, out)
	if n < 2 {
		t.Errorf("%d weight files", n)
	}
	for _, spec := range m.Config.Tensors() {
		v, err := m.Params.ReadF32(Weights, spec.Name)
		if err != nil {
			t.Fatal(err)
		}
		dtype, data := "F32", f32Bytes(v...)
		if !spec.KeepF32 {
			dtype, data = "BF16", make([]byte, 2*len(v))
			kernels.ToBF16s(data, v)
		}
		if g := got[spec.Name]; g.DType != dtype || !bytes.Equal(g.Data, data) {
			t.Errorf("%s is %s, want %s; data equal %v", spec.Name, g.DType, dtype, bytes.Equal(g.Data, data))
		}
	}
	b, err := os.ReadFile(filepath.Join(out, configFile))
	if err != nil || !strings.Contains(string(b), `"dtype": "bfloat16"`) {
		t.Errorf("config.json %s (%v)", b, err)
	}
}

func TestTensorsAreWrittenInPieces(t *testing.T) {
	dev := openCPU(t)
	cfg := smallConfig(true)
	cfg.VocabSize = savePiece/8 + 5 // an embedding a little over one piece
	m, err := NewRandom(cfg, dev, 3, LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	e, _ := m.Params.Lookup(EmbedName)
	v, err := m.Params.ReadF32(Weights, EmbedName)
	if err != nil {
		t.Fatal(err)
	}
	for _, dtype := range []string{"F32", "BF16", "F64"} {
		want := make([]byte, dtypeBytes(dtype)*len(v))
		if err := EncodeFloat32(want, dtype, v); err != nil {
			t.Fatal(err)
		}
		var got bytes.Buffer
		if err := m.Params.source(e, e.Name, dtype, true).write(&got); err != nil || !bytes.Equal(got.Bytes(), want) {
			t.Errorf("%s: %d bytes, want %d (%v)", dtype, got.Len(), len(want), err)
		}
	}
}

func TestWithDType(t *testing.T) {
	for in, want := range map[string]string{
		`{"dtype":null, "torch_dtype" : "x" ,"a":[{"dtype":"k"}], "n":1.0e5}`: `{"dtype":"float32", "torch_dtype" : "float32" ,"a":[{"dtype":"k"}], "n":1.0e5}`,
		` {"text_config":null} `:                   ` {"text_config":null} `,
		`{"text_config": { "dtype": "a" }, "b":2}`: `{"text_config": { "dtype": "float32" }, "b":2}`,
	} {
		if got, err := withDType([]byte(in), "float32"); err != nil || string(got) != want {
			t.Errorf("%s became %s (%v)", in, got, err)
		}
	}
	for _, in := range []string{``, `[]`, `{"a":}`, `{"text_config":{"a"}}`} {
		if _, err := withDType([]byte(in), "float32"); err == nil {
			t.Errorf("%s was accepted", in)
		}
	}
}

func TestHalfRounding(t *testing.T) {
	for h := range 1 << 16 {
		f := halfToFloat(uint16(h))
		got := floatToHalf(f)
		if f != f {
			if got&0x7fff <= 0x7c00 || got>>15 != uint16(h)>>15 {
				t.Fatalf("NaN %#x became %#x", h, got)
			}
			continue
		}
		if got != uint16(h) {
			t.Fatalf("%#x (%v) became %#x", h, f, got)
		}
		next := halfToFloat(uint16(h) + 1)
		if h&0x7fff >= 0x7bff {
			continue
		}
		mid := (f + next) / 2 // exact in float32
		even := uint16(h + h&1)
		if got := floatToHalf(mid); got != even {
			t.Fatalf("%v between %#x and its successor became %#x", mid, h, got)
		}
		if got := floatToHalf(math.Nextafter32(mid, f)); got != uint16(h) {
			t.Fatalf("just before the middle after %#x: %#x", h, got)
		}
		if got := floatToHalf(math.Nextafter32(mid, next)); got != uint16(h+1) {
			t.Fatalf("just past the middle after %#x: %#x", h, got)
		}
	}
	for x, want := range map[float32]uint16{65519: 0x7bff, 65520: 0x7c00, -1e9: 0xfc00, 1e-9: 0} {
		if got := floatToHalf(x); got != want {
			t.Errorf("%v became %#x, want %#x", x, got, want)
		}
	}
	b := binary.LittleEndian.AppendUint64(nil, math.Float64bits(0.1))
	if err := EncodeFloat32(b, "I64", []float32{1}); err == nil {
		t.Error("an integer type was written")
	}
	if err := EncodeFloat32(b[:3], "F32", []float32{1}); err == nil {
		t.Error("a short buffer was accepted")
	}
}
