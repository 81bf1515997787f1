package main

import (
	"fmt"
	"os"
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

func isDir(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}
