package model

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
)

// SaveDType says in which types Save stores the weights.
type SaveDType uint8

const (
	// SaveFloat32 stores every weight in float32: exact, what a run needs to go on with the same bits.
	SaveFloat32 SaveDType = iota
	// SaveStored stores each weight in the dtype it has in the directory of SaveOptions.Keep, rounded to nearest even. Without Keep it
	// is the dtype of published checkpoints: bfloat16, and float32 for A_log and the gated norm.
	SaveStored
)

// SaveOptions say what SaveAs writes. The zero value is what Save does.
type SaveOptions struct {
	// Keep is the directory of the checkpoint that training started from. Everything that is not a text parameter is taken over from it
	// bit for bit: vision tower, MTP head, tensor names, config.json (but for its dtype with SaveFloat32) and the processor's files.
	// Empty means a text-only checkpoint with a flat config.json.
	Keep string
	// DType is the stored type of the text parameters.
	DType SaveDType
	// MaxShardBytes bounds the tensor data of a weight file; more gives several files and an index. A larger single tensor gets its own
	// file. 0 means one file.
	MaxShardBytes int64
}

// SaveAs writes a Hugging Face directory as o asks for, with the SHA-256 of every file in SHA256SUMS (VerifySums). At every instant dir is
// what it was or complete: an existing checkpoint, that of Keep included, is replaced as a whole, whatever its shards, and files there
// that are no part of one stay. A save that was killed leaves the hidden folder .NAME.saving beside dir; the next one to the same dir goes
// on with it. Host memory stays below 32 MiB whatever the size of the model.
func (m *Model) SaveAs(dir string, o SaveOptions) error { return m.saveAs(dir, o, nil) }

// CheckSave finds out what would make SaveAs fail, before the work whose result it is to save: options, the checkpoint to keep, what is in
// dir. It returns about how many bytes SaveAs writes.
func (m *Model) CheckSave(dir string, o SaveOptions) (bytes int64, err error) {
	p, err := m.planSave(o)
	if err != nil {
		return 0, err
	}
	if err = (&saver{dir: filepath.Clean(dir)}).inspect(p.outs); err != nil {
		err = fmt.Errorf("save model: %w", err)
	}
	return p.bytes, errors.Join(err, p.close())
}

// saveAs is SaveAs with the step function of writeDir.
func (m *Model) saveAs(dir string, o SaveOptions, step func(string)) error {
	p, err := m.planSave(o)
	if err != nil {
		return err
	}
	return errors.Join(writeDir(dir, p.outs, step), p.close())
}

// savePlan is what a save writes. kept is the open checkpoint that some of it comes from, or nil.
type savePlan struct {
	outs  []output
	bytes int64 // of tensors
	kept  *Checkpoint
}

func (p *savePlan) close() error {
	if p.kept == nil {
		return nil
	}
	return p.kept.Close()
}

func (m *Model) planSave(o SaveOptions) (p *savePlan, err error) {
	if o.DType > SaveStored || o.MaxShardBytes < 0 {
		return nil, fmt.Errorf("save model: dtype option %d, shard limit %d", o.DType, o.MaxShardBytes)
	}
	p = &savePlan{}
	var files map[string][]byte
	var ts []source
	if o.Keep == "" {
		files, ts = m.textOnly(o)
	} else if files, ts, err = m.keeping(o, p); err != nil {
		return nil, errors.Join(err, p.close())
	}
	for _, t := range ts {
		p.bytes += t.bytes
	}
	if p.outs, err = checkpointFiles(files, ts, o.MaxShardBytes); err != nil {
		return nil, errors.Join(fmt.Errorf("save model: %w", err), p.close())
	}
	return p, nil
}

// textOnly lists the files and weights of a save without Keep.
func (m *Model) textOnly(o SaveOptions) (files map[string][]byte, ts []source) {
	dtype := "float32"
	stored := map[string]string{}
	if o.DType == SaveStored {
		dtype = "bfloat16"
		for _, t := range m.Config.Tensors() {
			if !t.KeepF32 {
				stored[t.Name] = "BF16"
			}
		}
	}
	files = map[string][]byte{configFile: m.Config.flat(dtype)}
	m.addFiles(files)
	for _, e := range m.Params.entries {
		t := "F32"
		if s, ok := stored[e.Name]; ok {
			t = s
		}
		ts = append(ts, m.Params.source(e, e.Name, t, o.DType == SaveStored))
	}
	return files, ts
}

// addFiles adds the tokenizer and template files that the model was loaded with.
func (m *Model) addFiles(files map[string][]byte) {
	for name, b := range m.Files {
		files[filepath.Base(name)] = b
	}
	if m.Tok != nil {
		files[tokenizerFile] = m.Tok.JSON()
	}
}

// keeping lists the files and weights of a save with Keep, and opens that checkpoint in p. Tensors that are not parameters go from the
// mapped source to the new file.
func (m *Model) keeping(o SaveOptions, p *savePlan) (files map[string][]byte, ts []source, err error) {
	if files, err = m.keptFiles(o); err != nil {
		return nil, nil, err
	}
	c, err := openDir(o.Keep, true)
	if err != nil {
		return nil, nil, err
	}
	p.kept = c
	if err := c.Check(m.Config); err != nil {
		return nil, nil, err
	}
	for i, f := range c.files {
		for _, t := range f.tensors {
			if !c.stored[place{i, t.Name}] {
				continue
			}
			name, text := textName(t.Name)
			if text && name == lmHead && m.Config.TieEmbeddings {
				continue // a stale copy of the embedding; loaders tie it again
			}
			if !text {
				ts = append(ts, f.source(t))
				continue
			}
			e, ok := m.Params.Lookup(name)
			if !ok {
				return nil, nil, fmt.Errorf("save model: %q is not a parameter", name)
			}
			dtype := t.DType
			if o.DType == SaveFloat32 {
				dtype = "F32"
			}
			ts = append(ts, m.Params.source(e, t.Name, dtype, true))
		}
	}
	return files, ts, nil
}

// keptFiles returns the files beside the weights: those of o.Keep, and over them the tokenizer and templates the model works with.
func (m *Model) keptFiles(o SaveOptions) (map[string][]byte, error) {
	text, err := os.ReadFile(filepath.Join(o.Keep, configFile))
	if err != nil {
		return nil, &Error{Op: "save model", Err: err, Hint: "the checkpoint to keep must be a Hugging Face directory"}
	}
	cfg, err := ParseConfig(text)
	if err != nil {
		return nil, fmt.Errorf("save model: %s: %w", o.Keep, err)
	}
	if diff := cfg.differences(m.Config); len(diff) > 0 {
		return nil, &Error{Op: "save model", Err: fmt.Errorf("%s is another model: %w", filepath.Join(o.Keep, configFile), diff.err()),
			Hint: "give the checkpoint that training started from"}
	}
	if o.DType == SaveFloat32 {
		if text, err = withDType(text, "float32"); err != nil {
			return nil, fmt.Errorf("save model: %s: %w", o.Keep, err)
		}
	}
	entries, err := os.ReadDir(o.Keep)
	if err != nil {
		return nil, fmt.Errorf("save model: %w", err)
	}
	files := map[string][]byte{}
	for _, e := range entries {
		path := filepath.Join(o.Keep, e.Name())
		if st, err := os.Stat(path); err != nil || !st.Mode().IsRegular() || !carried(e.Name()) { // Stat: entries may be links
			continue
		}
		if files[e.Name()], err = os.ReadFile(path); err != nil {
			return nil, fmt.Errorf("save model: %w", err)
		}
	}
	m.addFiles(files)
	files[configFile] = text
	return files, nil
}

// carried reports whether a file of a checkpoint directory goes along with its weights: processor and tokenizer settings, templates,
// the licence; not the weights and not an index of weights.
func carried(name string) bool {
	switch {
	case strings.HasPrefix(name, "."), strings.HasSuffix(name, ".index.json"):
		return false
	case strings.HasPrefix(name, "LICENSE"):
		return true
	}
	return slices.Contains([]string{".json", ".jinja", ".txt"}, filepath.Ext(name))
}

// differences lists the values in which c and want differ, except those that do not change what the weights compute.
func (c *Config) differences(want *Config) (p problems) {
	a, b := reflect.ValueOf(*c), reflect.ValueOf(*want)
	for i := range a.NumField() {
		f := a.Type().Field(i)
		switch f.Name {
		case "EOS", "InitRange", "MaxPositions", "raw":
			continue
		}
		if x, y := a.Field(i).Interface(), b.Field(i).Interface(); !reflect.DeepEqual(x, y) {
			p.addf("%s is %v, the model has %v", f.Name, x, y)
		}
	}
	return p
}

// withDType returns the text of a config.json in which dtype and torch_dtype, at the top and in text_config, are value. All other bytes
// stay as they are.
func withDType(text []byte, value string) ([]byte, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, fmt.Errorf("not a JSON object (%v, %v)", t, err)
	}
	var out []byte
	done := 0
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, err
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil, err
		}
		put := []byte(nil)
		switch {
		case key == "dtype" || key == "torch_dtype":
			put = []byte(`"` + value + `"`)
		case key == "text_config" && raw[0] == '{':
			if put, err = withDType(raw, value); err != nil {
				return nil, err
			}
		default:
			continue
		}
		end := int(d.InputOffset())
		out = append(append(out, text[done:end-len(raw)]...), put...)
		done = end
	}
	return append(out, text[done:]...), nil
}

// savePiece is how many elements of a tensor are in host memory at a time while it is written.
const savePiece = 1 << 20

// source is a weight to write under a name in a dtype, split ones joined. With check, a value that is not finite there is an error.
func (p *Params) source(e Entry, name, dtype string, check bool) source {
	return source{name, dtype, e.Shape, int64(dtypeBytes(dtype)) * e.Len, func(w io.Writer) error {
		held := fileDType(p.DType.Wide())
		v := make([]float32, min(e.Len, savePiece))
		out := make([]byte, dtypeBytes(dtype)*len(v))
		var masters []byte
		for at := int64(0); at < e.Len; at += savePiece {
			n := min(savePiece, e.Len-at)
			var err error
			if masters, err = p.masters(masters, e, at, n); err != nil {
				return err
			}
			b := masters
			if check || held != dtype {
				if err := DecodeFloat32(v[:n], held, b); err != nil {
					return err
				}
			}
			if check {
				if err := checkRange(v[:n], dtype, at); err != nil {
					return err
				}
			}
			if held != dtype {
				b = out[:n*int64(dtypeBytes(dtype))]
				if err := EncodeFloat32(b, dtype, v[:n]); err != nil {
					return err
				}
			}
			if _, err := w.Write(b); err != nil {
				return err
			}
		}
		return nil
	}}
}

// checkRange reports the first value that is not finite after rounding to dtype; first is the position of v in its tensor.
func checkRange(v []float32, dtype string, first int64) error {
	limit := math.Inf(1) // the least magnitude that rounds to infinity
	switch dtype {
	case "BF16":
		limit = 0x1.ffp127
	case "F16":
		limit = 65520
	}
	for i, x := range v {
		a := math.Abs(float64(x))
		if a < limit {
			continue
		}
		if a > math.MaxFloat32 || a != a {
			return fmt.Errorf("element %d is %v: %w", first+int64(i), x, ErrNonFinite)
		}
		return fmt.Errorf("element %d is %v, too large for %s", first+int64(i), x, dtype)
	}
	return nil
}
