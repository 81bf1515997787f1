package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"harness-s/trainer"
)

// configCmd is about the configuration: hs config.
type configCmd struct {
	Show  configShow  `cmd:"" help:"The resolved configuration as TOML; --origin says where each value came from."`
	Check configCheck `cmd:"" help:"Resolve and validate; exit code 2 lists every problem."`
	Diff  configDiff  `cmd:"" help:"Keys that differ from the defaults."`
	Doc   configDoc   `cmd:"" help:"Every key with type, default, range and meaning."`
}

type configShow struct {
	configFlags
	Origin bool `help:"Print key, value and origin instead of TOML."`
}

// Run prints the configuration.
func (c *configShow) Run(g *globals) error {
	res, err := c.load(g)
	if err != nil {
		return err
	}
	if g.JSON {
		return g.emit(map[string]any{"config": keyValues(res), "digest": res.Config.Digest()})
	}
	if !c.Origin {
		_, err = g.out.Write(res.Config.TOML())
		return err
	}
	for _, k := range keyValues(res) {
		fmt.Fprintf(g.out, "%-32s %-24s %s\n", k.Key, k.Value, k.Origin)
	}
	return nil
}

type keyValue struct {
	Key     string `json:"key"`
	Value   string `json:"value"`
	Default string `json:"default"`
	Origin  string `json:"origin"`
}

func keyValues(res *trainer.Resolved) []keyValue {
	out := []keyValue{}
	for _, d := range trainer.Doc() {
		v, _ := res.Config.Value(d.Path) // Doc lists no unknown key
		if strings.Trim(v, "{ }") == "" && v != "" {
			v = "{}" // an empty table
		}
		out = append(out, keyValue{d.Path, v, d.Default, res.Origin(d.Path)})
	}
	return out
}

type configCheck struct{ configFlags }

// Run validates.
func (c *configCheck) Run(g *globals) error {
	res, err := c.load(g)
	if err != nil {
		return err
	}
	g.say("configuration is valid, digest %s", res.Config.Digest())
	if g.JSON {
		return g.emit(map[string]any{"ok": true, "digest": res.Config.Digest()})
	}
	return nil
}

type configDiff struct{ configFlags }

// Run prints what is not default.
func (c *configDiff) Run(g *globals) error {
	res, err := c.load(g)
	if err != nil {
		return err
	}
	diff := slices.DeleteFunc(keyValues(res), func(k keyValue) bool { return k.Value == k.Default })
	if g.JSON {
		return g.emit(map[string]any{"diff": diff})
	}
	if len(diff) == 0 {
		g.say("no key differs from its default")
	}
	for _, k := range diff {
		fmt.Fprintf(g.out, "%-32s %s -> %s  (%s)\n", k.Key, k.Default, k.Value, k.Origin)
	}
	return nil
}

type configDoc struct {
	Metrics bool `help:"Document the metrics instead."`
}

// Run lists keys or metrics.
func (c *configDoc) Run(g *globals) error {
	if c.Metrics {
		if g.JSON {
			return g.emit(map[string]any{"metrics": trainer.Metrics()})
		}
		for _, m := range trainer.Metrics() {
			fmt.Fprintf(g.out, "%-28s %s\n", m.Name, m.Doc)
		}
		return nil
	}
	if g.JSON {
		return g.emit(map[string]any{"keys": trainer.Doc()})
	}
	for _, d := range trainer.Doc() {
		fmt.Fprintf(g.out, "%-32s %-10s default %-14s %s", d.Path, d.Type, d.Default, d.Doc)
		if d.Range != "" {
			fmt.Fprintf(g.out, " [%s]", d.Range)
		}
		fmt.Fprintln(g.out)
	}
	return nil
}

// initCmd writes a configuration file: hs init.
type initCmd struct {
	Preset string `arg:"" optional:"" default:"demo" help:"Preset to start from."`
	List   bool   `help:"List the presets."`
	Out    string `short:"o" default:"hs.toml" type:"path" help:"File to write."`
	Force  bool   `help:"Replace an existing file."`
}

// Run writes the file; an existing one is never replaced without --force.
func (c *initCmd) Run(ctx context.Context, g *globals) error {
	if c.List {
		names := trainer.Presets()
		if g.JSON {
			return g.emit(map[string]any{"presets": names})
		}
		fmt.Fprintln(g.out, strings.Join(names, "\n"))
		return nil
	}
	text, err := trainer.Preset(c.Preset)
	if err != nil {
		return err
	}
	if st, err := os.Stat(c.Out); err == nil && st.IsDir() {
		return usage("-o "+filepath.Join(c.Out, "hs.toml"), "%s is a directory", c.Out)
	} else if err == nil && !c.Force {
		return usage("--force replaces it; -o FILE writes elsewhere", "%s exists", c.Out)
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if dir := filepath.Dir(c.Out); !isDir(dir) {
		return usage("mkdir -p "+dir, "no directory %s", dir)
	}
	res, err := trainer.Load([]trainer.Layer{{Name: "preset " + c.Preset, Text: text}}, nil)
	if err != nil {
		return err
	}
	if err := trainer.WriteAtomic(c.Out, res.Config.Commented()); err != nil {
		return err
	}
	if g.JSON {
		return g.emit(map[string]any{"path": c.Out, "preset": c.Preset})
	}
	g.say("wrote %s; next: hs train -c %s", c.Out, c.Out)
	return nil
}

func isDir(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}
