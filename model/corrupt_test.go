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
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"harness-s/kernels"
)

// goodCheckpoint writes a small checkpoint in three shards or more, with a tokenizer, and returns its directory.
func goodCheckpoint(t *testing.T) string {
	t.Helper()
	cfg := smallConfig(false)
	cfg.VocabSize = 300
	dir := filepath.Join(t.TempDir(), "ckpt")
	if err := WriteCheckpointSharded(dir, cfg.JSON(), checkpointTensors(cfg, "model.language_model."), 6000); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, tokenizerFile), byteTokenizer(nil), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// byteTokenizer is a tokenizer.json with the 256 bytes and the added tokens given as JSON.
func byteTokenizer(added json.RawMessage) []byte {
	vocab := map[string]int{}
	for b, c := range byteToChar() {
		vocab[string(c)] = b
	}
	v, _ := json.Marshal(vocab) // strings and numbers alone cannot fail
	pattern, _ := json.Marshal(splitPattern)
	if added == nil {
		added = json.RawMessage("[]")
	}
	return fmt.Appendf(nil, `{"added_tokens":%s,"normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":%s},`+
		`"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false}]},`+
		`"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":%s,"merges":[]}}`, added, pattern, v)
}

// corruption damages a good checkpoint; the error must contain every want.
type corruption struct {
	name   string
	damage func(t *testing.T, dir string)
	want   []string
}

// change replaces a file by what f makes of it.
func change(name string, f func([]byte) []byte) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		t.Helper()
		path := filepath.Join(dir, name)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, f(b), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func put(name, text string) func(*testing.T, string) {
	return change(name, func([]byte) []byte { return []byte(text) })
}

// header replaces text in the header of the first shard, keeping its data; the length word follows.
func header(old, new string) func(*testing.T, string) {
	return change(shard1, func(b []byte) []byte {
		n := binary.LittleEndian.Uint64(b)
		h := strings.Replace(string(b[8:8+n]), old, new, 1)
		out := binary.LittleEndian.AppendUint64(nil, uint64(len(h)))
		return append(append(out, h...), b[8+n:]...)
	})
}

// key sets a key of config.json; nil removes it.
func key(name string, value any) func(*testing.T, string) {
	return change(configFile, func(b []byte) []byte {
		var m map[string]any
		if err := json.Unmarshal(b, &m); err != nil {
			panic(err) // the test's own file
		}
		delete(m, name)
		if value != nil {
			m[name] = value
		}
		out, err := json.Marshal(m)
		if err != nil {
			panic(err)
		}
		return out
	})
}

func inDir(do func(dir string) error) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		t.Helper()
		if err := do(dir); err != nil {
			t.Fatal(err)
		}
	}
}

const shard1 = "model-00001-of-00003.safetensors"

func shard(f func(path string) error) func(*testing.T, string) {
	return inDir(func(dir string) error {
		path := filepath.Join(dir, shard1)
		return errors.Join(os.Remove(path), f(path))
	})
}

func length(order binary.AppendByteOrder, n uint64) func(*testing.T, string) {
	return change(shard1, func(b []byte) []byte { return append(order.AppendUint64(nil, n), b[8:]...) })
}

func corruptions() []corruption {
	const embed = `"model.language_model.embed_tokens.weight"`
	value := func(bits uint32) func(*testing.T, string) {
		return change(shard1, func(b []byte) []byte {
			binary.LittleEndian.PutUint32(b[len(b)-8:], bits)
			return b
		})
	}
	return []corruption{
		{"empty shard", put(shard1, ""), []string{shard1, "truncated", "at least 8"}},
		{"shard of text", put(shard1, "<!DOCTYPE html><html>"), []string{shard1, "exceeds the limit", "not a safetensors file"}},
		{"header cut", change(shard1, func(b []byte) []byte { return b[:60] }), []string{shard1, "truncated", "file of 60"}},
		{"data cut", change(shard1, func(b []byte) []byte { return b[:len(b)-1] }), []string{shard1, "truncated", "data bytes"}},
		{"negative length", length(binary.LittleEndian, math.MaxUint64), []string{shard1, "exceeds the limit"}},
		{"length of 99 MiB", length(binary.LittleEndian, 99<<20), []string{shard1, "truncated"}},
		{"big-endian length", func(t *testing.T, dir string) {
			change(shard1, func(b []byte) []byte {
				return append(binary.BigEndian.AppendUint64(nil, binary.LittleEndian.Uint64(b)), b[8:]...)
			})(t, dir)
		}, []string{shard1, "exceeds the limit"}},
		{"length too short", length(binary.LittleEndian, 16), []string{shard1, "parse safetensors header"}},
		{"header is a list", put(shard1, "\x02\x00\x00\x00\x00\x00\x00\x00[]"), []string{shard1, "not a JSON object"}},
		{"header trailing text", header("]}}", "]}} x"), []string{shard1, "data after the JSON object"}},
		{"header second object", header("]}}", "]}}{}"), []string{shard1, "after the JSON object"}},
		{"header not UTF-8", header("embed", "\xff\xfebed"), []string{shard1, "not UTF-8"}},
		{"header nested deep", change(shard1, func([]byte) []byte {
			h := `{"a":` + strings.Repeat(`[`, 1<<20)
			return append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h...)
		}), []string{shard1, "parse safetensors header"}},
		{"duplicate name", header(`{"__metadata__":{"format":"pt"},`, `{`+embed+`:{"dtype":"F32","shape":[0],"data_offsets":[0,0]},`), []string{shard1, "appears twice"}},
		{"two prefixes", func(t *testing.T, dir string) {
			change(indexFile, func(b []byte) []byte {
				return bytes.Replace(b, []byte(`"weight_map": {`), []byte(`"weight_map": {"model.embed_tokens.weight": "`+shard1+`",`), 1)
			})(t, dir)
			header(`{"__metadata__":{"format":"pt"},`, `{"model.embed_tokens.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},`)(t, dir)
		}, []string{"the same parameter"}},
		{"overlap", header(`[0,9600]`, `[0,9600]},"x":{"dtype":"U8","shape":[4],"data_offsets":[8,12]`), []string{shard1, "overlap"}},
		{"offset beyond", header(`[0,9600]`, `[9600,19200]`), []string{shard1, "truncated", "9600..19200"}},
		{"offset negative", header(`[0,9600]`, `[-9600,0]`), []string{shard1, "0 <= begin"}},
		{"offset huge", header(`[0,9600]`, `[0,99999999999999999999]`), []string{shard1, "embed_tokens"}},
		{"shape overflow", header(`[300,8]`, `[2147483647,2147483647,2147483647]`), []string{shard1, "overflows"}},
		{"shape negative", header(`[300,8]`, `[-300,-8]`), []string{shard1, "dimension -300"}},
		{"shape wrong", header(`[300,8]`, `[8,300]`), []string{"embed_tokens", "[8 300]", "config.json asks for [300 8]"}},
		{"zero-length tensor", header(`"shape":[300,8],"data_offsets":[0,9600]`, `"shape":[0,8],"data_offsets":[0,0]`), []string{"embed_tokens", "[0 8]"}},
		{"dtype integer", header(`"dtype":"F32"`, `"dtype":"I32"`), []string{"dtype I32", "want F32, BF16, F16 or F64"}},
		{"dtype of 8 bits", header(`"dtype":"F32","shape":[300,8],"data_offsets":[0,9600]`, `"dtype":"F8_E4M3","shape":[300,8],"data_offsets":[0,2400]`), []string{"dtype F8_E4M3", "want F32"}},
		{"dtype half too short", header(`"dtype":"F32"`, `"dtype":"F16"`), []string{shard1, "needs 4800 bytes"}},
		{"dtype unknown", header(`"dtype":"F32"`, `"dtype":"Q4_K"`), []string{shard1, `unknown dtype "Q4_K"`}},
		{"NaN", value(0x7fc00000), []string{"embed_tokens", "[299 6]", "NaN", "non-finite"}},
		{"infinity", value(0xff800000), []string{"embed_tokens", "[299 6]", "-Inf"}},

		{"shard missing", inDir(func(dir string) error { return os.Remove(filepath.Join(dir, shard1)) }), []string{shard1, "missing"}},
		{"shard is a directory", shard(func(path string) error { return os.Mkdir(path, 0o755) }), []string{shard1, "not a file"}},
		{"shard is a pipe", shard(func(path string) error { return syscall.Mkfifo(path, 0o644) }), []string{shard1, "not a file"}},
		{"shard is a loop of links", shard(func(path string) error { return os.Symlink(shard1, path) }), []string{shard1, "too many levels"}},
		{"shard is a dangling link", shard(func(path string) error { return os.Symlink("gone", path) }), []string{shard1, "missing"}},
		{"tensor missing", change(indexFile, func(b []byte) []byte {
			return regexp.MustCompile(`,\s*"model.language_model.norm.weight": "[^"]*"`).ReplaceAll(b, nil)
		}), []string{`"model.norm.weight"`, "is missing"}},
		{"tensor not in shard", change(indexFile, func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"weight_map": {`), []byte(`"weight_map": {"model.ghost": "`+shard1+`",`), 1)
		}), []string{shard1, `"model.ghost"`, "not in the file"}},
		{"unknown tensor", func(t *testing.T, dir string) {
			header(`{"__metadata__":{"format":"pt"},`, `{"model.ghost":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},`)(t, dir)
			change(indexFile, func(b []byte) []byte {
				return bytes.Replace(b, []byte(`"weight_map": {`), []byte(`"weight_map": {"model.ghost": "`+shard1+`",`), 1)
			})(t, dir)
		}, []string{`"model.ghost" is not a parameter`}},
		{"index leaves the directory", change(indexFile, func(b []byte) []byte { return bytes.ReplaceAll(b, []byte(shard1), []byte("../"+shard1)) }), []string{indexFile, "not a plain file name"}},
		{"index not JSON", put(indexFile, "{"), []string{indexFile, "unexpected end"}},
		{"index empty", put(indexFile, ""), []string{indexFile}},
		{"index without map", put(indexFile, `{"metadata":{}}`), []string{indexFile, "weight_map is empty"}},
		{"index map of numbers", put(indexFile, `{"weight_map":{"a":1}}`), []string{indexFile, "weight_map"}},
		{"index missing", inDir(func(dir string) error { return os.Remove(filepath.Join(dir, indexFile)) }), []string{"neither model.safetensors nor " + indexFile}},

		{"config missing", inDir(func(dir string) error { return os.Remove(filepath.Join(dir, configFile)) }), []string{configFile}},
		{"config is a directory", inDir(func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, configFile)), os.Mkdir(filepath.Join(dir, configFile), 0o755))
		}), []string{configFile, "is a directory"}},
		{"config not JSON", put(configFile, "\x80\x04"), []string{configFile, "invalid character"}},
		{"config a list", put(configFile, "[]"), []string{configFile, "array", "want an object"}},
		{"config key missing", key("hidden_size", nil), []string{"hidden_size is missing"}},
		{"config key of text", key("hidden_size", "8"), []string{"hidden_size is a string, want a whole number"}},
		{"config nested key", key("text_config", map[string]any{"tie_word_embeddings": 3}), []string{"text_config.tie_word_embeddings is a number, want true or false"}},
		{"config nested list", key("text_config", []int{1}), []string{"text_config is a array, want an object"}},
		{"config huge", key("vocab_size", json.Number("1e40")), []string{"vocab_size", "want a whole number"}},
		{"config too wide", key("hidden_size", 1<<40), []string{"hidden_size = 1099511627776", "want <="}},
		{"config negative", key("intermediate_size", -12), []string{"intermediate_size = -12, want >= 1"}},
		{"config many layers", key("num_hidden_layers", 1<<30), []string{"num_hidden_layers = 1073741824"}},
		{"config heads do not divide", key("num_key_value_heads", 3), []string{"num_attention_heads = 2 is not a multiple of num_key_value_heads = 3"}},
		{"config layer_types short", key("layer_types", []string{"linear_attention"}), []string{"layer_types has 1 entries, num_hidden_layers = 2"}},
		{"config layer_types unknown", key("layer_types", []string{"mamba", "full_attention"}), []string{`layer_types[0] = "mamba"`}},
		{"config of another model", key("model_type", "llama"), []string{`model_type = "llama"`}},

		{"tokenizer not JSON", put(tokenizerFile, "{"), []string{tokenizerFile, "unexpected end"}},
		{"tokenizer empty", put(tokenizerFile, "{}"), []string{tokenizerFile, "model.type"}},
		{"tokenizer of another kind", change(tokenizerFile, func(b []byte) []byte { return bytes.Replace(b, []byte(`"BPE"`), []byte(`"Unigram"`), 1) }), []string{tokenizerFile, `"Unigram"`, "want BPE"}},
		{"tokenizer token without id", put(tokenizerFile, string(byteTokenizer(json.RawMessage(`[{"content":"<x>"}]`)))), []string{tokenizerFile, "added_tokens[0] has no id"}},
		{"tokenizer huge id", put(tokenizerFile, string(byteTokenizer(json.RawMessage(`[{"id":2147483647,"content":"<x>"}]`)))), []string{tokenizerFile, "2147483647"}},
		{"tokenizer larger than the model", put(tokenizerFile, string(byteTokenizer(json.RawMessage(`[{"id":300,"content":"<x>","normalized":false}]`)))), []string{"301 tokens", "vocab_size is 300"}},
		{"tokenizer_config token without content", inDir(func(dir string) error {
			return os.WriteFile(filepath.Join(dir, tokenizerConfigFile), []byte(`{"added_tokens_decoder":{"256":{"special":true}}}`), 0o644)
		}), []string{"no id or no content"}},
		{"tokenizer without a byte", change(tokenizerFile, func(b []byte) []byte { return bytes.Replace(b, []byte(`"a":`), []byte(`"aa":`), 1) }), []string{tokenizerFile, "byte 0x61"}},
	}
}

// TestCorruptCheckpoints loads a checkpoint with each kind of damage: an error that names the file or key and what was expected, nothing
// large allocated on the way, no arena left.
func TestCorruptCheckpoints(t *testing.T) {
	dev := openCPU(t)
	m, err := Load(goodCheckpoint(t), dev, LoadOptions{})
	if err != nil {
		t.Fatalf("the good one: %v", err)
	}
	m.Close()
	for _, c := range corruptions() {
		t.Run(c.name, func(t *testing.T) {
			dir := goodCheckpoint(t)
			c.damage(t, dir)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			m, err := Load(dir, dev, LoadOptions{})
			runtime.ReadMemStats(&after)
			if err == nil {
				m.Close()
				t.Fatal("loaded")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error lacks %q: %v", want, err)
				}
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 64<<20 {
				t.Errorf("%d MiB allocated", n>>20)
			}
		})
	}
	t.Run("no permission", func(t *testing.T) {
		dir := goodCheckpoint(t)
		if err := os.Chmod(filepath.Join(dir, shard1), 0); err != nil {
			t.Fatal(err)
		}
		if os.Geteuid() == 0 {
			t.Skip("root reads every file; run as another user: su nobody -s /bin/sh -c 'go test ./model -run TestCorruptCheckpoints'")
		}
		if _, err := Load(dir, dev, LoadOptions{}); !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), shard1) {
			t.Errorf("error %v", err)
		}
	})
}

// FuzzConfig checks that no config.json breaks the parser, and that an accepted one has a finite list of tensors of positive size and
// survives being written.
func FuzzConfig(f *testing.F) {
	f.Add(smallConfig(true).JSON())
	f.Add([]byte(config4B()))
	f.Add([]byte(`{"text_config":{"vocab_size":-1,"layer_types":["x"],"eos_token_id":[1,"a"]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ParseConfig(b)
		if err != nil {
			return
		}
		for _, s := range c.Tensors() {
			for _, d := range s.Shape {
				if d < 1 {
					t.Fatalf("%s has shape %v", s.Name, s.Shape)
				}
			}
		}
		again, err := ParseConfig(c.JSON())
		if err != nil {
			t.Fatalf("written form: %v", err)
		}
		if diff := c.differences(again); len(diff) > 0 {
			t.Fatalf("written form: %v", diff.err())
		}
	})
}

// FuzzCheckpoint checks that no index together with a shard breaks opening and checking, and that what passes loads on the device without
// memory.
func FuzzCheckpoint(f *testing.F) {
	cfg := smallConfig(true)
	ts := sources(checkpointTensors(cfg, ""))
	head, err := encodeHeader(ts, nil)
	if err != nil {
		f.Fatal(err)
	}
	file := bytes.NewBuffer(head)
	index := map[string]string{}
	for _, s := range ts {
		index[s.name] = "a"
		if err := s.write(file); err != nil {
			f.Fatal(err)
		}
	}
	text, err := json.Marshal(map[string]any{"weight_map": index})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text, file.Bytes())
	f.Add([]byte(`{"weight_map":{"a":"../x","b":"a","mtp.x":"gone","c":""}}`), rawFile(`{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1))
	dev, err := kernels.Open("null", kernels.Options{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, index, shard []byte) {
		m, err := LoadFS(fstest.MapFS{configFile: {Data: cfg.JSON()}, indexFile: {Data: index}, "a": {Data: shard}}, dev, LoadOptions{})
		if err == nil {
			m.Close()
		}
	})
}

// FuzzTokenizer checks that no tokenizer.json breaks the parser, and that an accepted one gives back every text.
func FuzzTokenizer(f *testing.F) {
	f.Add(byteTokenizer(nil), []byte(`{"added_tokens_decoder":{"256":{"content":"<x>"}}}`), "a<x> b")
	f.Add(byteTokenizer(json.RawMessage(`[{"id":256,"content":"<y>","normalized":false}]`)), []byte(nil), "é\x00")
	f.Add([]byte(`{"model":{"type":"BPE"}}`), []byte(`{}`), "")
	f.Fuzz(func(t *testing.T, b, config []byte, text string) {
		tok, err := parseTokenizer(b, config)
		if err != nil {
			return
		}
		for _, id := range tok.Encode(text) {
			if id < 0 || int(id) >= tok.VocabSize() {
				t.Errorf("id %d of %d", id, tok.VocabSize())
			}
		}
	})
}
