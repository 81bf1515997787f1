// Command hs trains language-model agents with the Harness-S method, samples and evaluates them, and explains what it did.
//
// It wires packages together and talks to people: grammar, exit codes, tables and JSON live here, decisions do not. Start at cli for
// the grammar, then train.go, eval.go and sft.go, inspect.go (ls, show, report), doctor.go and bench.go.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"harness-s/env"
	"harness-s/env/dbbench"
	"harness-s/env/harness"
	"harness-s/kernels"
	"harness-s/model"
	"harness-s/trainer"
)

// version of the product and commit of the build; the Makefile sets commit.
var (
	version = "0.1.0"
	commit  = "unknown"
)

// Exit codes (design.md 10.2).
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitNotReady    = 3
	exitGate        = 4
	exitInterrupted = 130
)

// globals are the flags of every command.
type globals struct {
	Root    string `short:"C" name:"root" default:"runs" help:"Folder of the runs." type:"path"`
	Device  string `default:"auto" help:"auto, cpu, emu or cuda:N."`
	Threads int    `default:"0" help:"CPU threads, 0 = all cores. Results do not depend on it."`
	JSON    bool   `name:"json" help:"The last line of stdout is one JSON object, also when the command fails."`
	Quiet   bool   `short:"q" help:"No progress; with --json also no text for people."`
	Verbose bool   `short:"v" help:"Debug log on stderr."`
	Color   string `default:"auto" enum:"auto,always,never" help:"auto, always or never; auto = on a terminal without NO_COLOR."`

	out, errOut io.Writer
	progress    *progress
	emitted     bool // the JSON line has been printed

	autoName, autoWhy string // what the device "auto" is here; "" = not asked yet
	chosen            bool   // a device was opened as "auto"
}

// configFlags choose a configuration: defaults < preset < files in order < --set.
type configFlags struct {
	Preset string   `help:"Start from a shipped preset; list them with: hs init --list."`
	Config []string `short:"c" name:"config" type:"path" help:"TOML file; repeatable, later wins." placeholder:"FILE"`
	Set    []string `sep:"none" help:"Override one key, as section.key=value; repeatable." placeholder:"KEY=VALUE"`
}

type cli struct {
	globals

	Train   trainCmd   `cmd:"" help:"Train with GRPO and rescue under sibling harnesses."`
	Eval    evalCmd    `cmd:"" help:"Pass@1 and Pass@k of a checkpoint on a split."`
	SFT     sftCmd     `cmd:"" name:"sft" help:"Warm start on demonstrations; --new tiny makes a fresh tiny policy."`
	Play    playCmd    `cmd:"" help:"Run one episode and print it with the origin of every token."`
	Env     envCmd     `cmd:"" help:"Environments: list them, replay gold solutions."`
	Ls      lsCmd      `cmd:"" help:"List runs."`
	Show    showCmd    `cmd:"" help:"Drill into a run: RUN[/STEP[/TASK[/ATTEMPT]]]."`
	Report  reportCmd  `cmd:"" help:"Write a run's HTML report."`
	Config  configCmd  `cmd:"" help:"Show, check, diff or document the configuration."`
	Init    initCmd    `cmd:"" help:"Write a commented hs.toml."`
	Doctor  doctorCmd  `cmd:"" help:"Check machine, device, checkpoint, environment, disk; --parity checks the numerics."`
	Bench   benchCmd   `cmd:"" help:"Measure decode, prefill, train, a whole step, kernels."`
	Version versionCmd `cmd:"" help:"Version, commit, build, ABI."`

	Generate  generateCmd  `cmd:"" help:"Sample a continuation of a prompt from a checkpoint."`
	Score     scoreCmd     `cmd:"" help:"Log-probabilities of given tokens or text under a checkpoint."`
	Convert   convertCmd   `cmd:"" help:"Write a checkpoint for other programs, keeping what the original had besides the text weights."`
	InitModel initModelCmd `cmd:"" name:"init-model" help:"Write a checkpoint of a released shape with random weights."`
}

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run is main with its surroundings passed in, so that tests can call it.
func run(args []string, out, errOut io.Writer) (code int) {
	c := cli{}
	c.out, c.errOut = out, errOut
	exited := false
	k, err := kong.New(&c, kong.Name("hs"), kong.UsageOnError(),
		kong.Description("Trains language-model agents with Harness-S: GRPO with rescue of all-fail groups under sibling harnesses.\n\n"+
			"Start with hs doctor, then hs train --preset demo. Exit codes: 0 done, 1 failure, 2 usage, configuration or task rows, "+
			"3 environment or device not ready, 4 a gate stopped the run, 130 interrupted after a checkpoint."),
		kong.Writers(out, errOut), kong.Exit(func(int) { exited = true }), kong.ConfigureHelp(kong.HelpOptions{Compact: true}))
	if err != nil {
		fmt.Fprintln(errOut, "error:", err)
		return exitFailure
	}
	kctx, err := k.Parse(aliases(args))
	if exited {
		return exitOK
	}
	if err != nil {
		c.JSON = c.JSON || slices.Contains(args, "--json")
		return c.finish(exitError{code: exitUsage, err: &trainer.Error{Op: "read command line", Err: err, Hint: helpFor(err)}})
	}
	c.progress = newProgress(errOut, c.Quiet)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	kctx.BindTo(ctx, (*context.Context)(nil))
	err = c.execute(kctx)
	c.progress.done()
	return c.finish(err)
}

// aliases lets people type what other programs understand: nothing, help [COMMAND] and --version.
func aliases(args []string) []string {
	switch {
	case len(args) == 0:
		return []string{"--help"}
	case args[0] == "help":
		return append(slices.Clone(args[1:]), "--help")
	case args[0] == "--version":
		return append([]string{"version"}, args[1:]...)
	}
	return args
}

// helpFor names the help text of the command that a parse error is about.
func helpFor(err error) string {
	cmd := "hs"
	var pe *kong.ParseError
	if errors.As(err, &pe) && pe.Context != nil {
		for _, p := range pe.Context.Path {
			if p.Command != nil {
				cmd += " " + p.Command.Name
			}
		}
	}
	return cmd + " --help"
}

// execute runs the command and turns a panic into an error, with the stack on stderr.
func (g *globals) execute(k *kong.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("internal error: %v", p)
			fmt.Fprintf(g.errOut, "%s\n", debug.Stack())
		}
	}()
	return k.Run(g)
}

// failure is the JSON object of a command that did not get as far as its result.
type failure struct {
	OK       bool   `json:"ok"`
	Error    string `json:"error,omitempty"`
	Hint     string `json:"hint,omitempty"`
	ExitCode int    `json:"exit_code"`
}

// finish reports err and keeps the promise of --json: a command that has not printed its object gets a general one.
func (g *globals) finish(err error) int {
	code := report(g.errOut, err)
	if g.JSON && !g.emitted {
		f := failure{OK: err == nil, ExitCode: code, Hint: advice(err)}
		if err != nil {
			f.Error = err.Error()
		}
		if eerr := g.emit(f); eerr != nil {
			fmt.Fprintln(g.errOut, "error:", eerr)
			return exitFailure
		}
	}
	return code
}

// report prints an error with its hint and picks the exit code.
func report(w io.Writer, err error) int {
	if err == nil {
		return exitOK
	}
	var code exitError
	var data *dbbench.Error // task rows or a DSN that cannot be used as they are; faults of a server are infrastructure
	switch {
	case errors.As(err, &code) && code.silent:
		return code.code
	case errors.Is(err, trainer.ErrInterrupted):
		fmt.Fprintln(w, "interrupted after a clean checkpoint;", hintOf(err))
		return exitInterrupted
	}
	fmt.Fprintln(w, "error:", err)
	if h := advice(err); h != "" {
		fmt.Fprintln(w, "hint:", h)
	}
	switch {
	case errors.As(err, &code):
		return code.code
	case errors.Is(err, trainer.ErrGate):
		return exitGate
	case errors.Is(err, trainer.ErrConfig), errors.Is(err, trainer.ErrRunExists), errors.Is(err, trainer.ErrLocked):
		return exitUsage
	case errors.Is(err, trainer.ErrEnvDown), errors.Is(err, env.ErrInfra), errors.Is(err, kernels.ErrNoDevice):
		return exitNotReady
	case errors.As(err, &data):
		return exitUsage
	}
	return exitFailure
}

// advice is the hint of err; an infrastructure fault without one gets a general one.
func advice(err error) string {
	if h := hintOf(err); h != "" || !errors.Is(err, env.ErrInfra) {
		return h
	}
	return "start the database server, or correct address, user and password (--dsn, task.dsn); hs doctor --set task.dsn=DSN checks it"
}

// exitError carries an exit code; a silent one has printed its result already.
type exitError struct {
	code   int
	silent bool
	err    error
}

func (e exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}
func (e exitError) Unwrap() error { return e.err }

// usage is a mistake in what was typed, with what to type instead.
func usage(hint, format string, args ...any) error {
	return exitError{code: exitUsage, err: &trainer.Error{Op: "read command line", Err: fmt.Errorf(format, args...), Hint: hint}}
}

// hintOf is the first hint in the tree of err, outermost first. Every package's Error type carries one.
func hintOf(err error) string {
	hint := ""
	switch e := err.(type) {
	case *trainer.Error:
		hint = e.Hint
	case *model.Error:
		hint = e.Hint
	case *kernels.Error:
		hint = e.Hint
	case *harness.Error:
		hint = e.Hint
	case *dbbench.Error:
		hint = e.Hint
	}
	if hint != "" {
		return hint
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		return hintOf(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, sub := range e.Unwrap() {
			if hint = hintOf(sub); hint != "" {
				return hint
			}
		}
	}
	return ""
}

// interruptible returns a channel that closes at the first Ctrl-C, after which a second one ends the process at once.
func (g *globals) interruptible(ctx context.Context) (<-chan struct{}, func()) {
	sig, closed, quit := make(chan os.Signal, 2), make(chan struct{}), make(chan struct{})
	signal.Notify(sig, os.Interrupt, syscall.SIGTERM)
	go func() {
		select {
		case <-sig:
		case <-quit:
			return
		}
		fmt.Fprintln(g.errOut, "\nfinishing the step and saving a checkpoint; press Ctrl-C again to stop at once (the last checkpoint stays)")
		close(closed)
		select {
		case <-sig:
			os.Exit(exitInterrupted)
		case <-quit:
		}
	}()
	return closed, func() { signal.Stop(sig); close(quit) }
}

// emit prints v as the JSON line of --json.
func (g *globals) emit(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode result: %w", err)
	}
	g.emitted = true
	_, err = fmt.Fprintln(g.out, string(b))
	return err
}

// say prints a line for people; with --json people read stderr.
func (g *globals) say(format string, args ...any) {
	fmt.Fprintf(g.people(), format+"\n", args...)
}

// confirm says that something was done; it is no result, so -q drops it.
func (g *globals) confirm(format string, args ...any) {
	if !g.Quiet {
		g.say(format, args...)
	}
}

func (g *globals) people() io.Writer {
	switch {
	case g.JSON && g.Quiet:
		return io.Discard
	case g.JSON:
		return g.errOut
	}
	return g.out
}

// colored reports whether text written to w has colours.
func (g *globals) colored(w io.Writer) bool {
	return g.Color == "always" || g.Color == "auto" && isTerminal(w) && os.Getenv("NO_COLOR") == ""
}

type versionCmd struct{}

func (versionCmd) Run(g *globals) error {
	v := map[string]any{"version": version, "commit": commit, "build": buildName(), "abi": abiVersion(), "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH}
	if g.JSON {
		return g.emit(v)
	}
	fmt.Fprintf(g.out, "hs %s (%s)\nbuild %s, ABI %d, %s %s/%s\n", version, commit, buildName(), abiVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return nil
}

// buildName is "gpu" in a build with the driver layer for NVIDIA GPUs, else "cpu".
func buildName() string {
	if kernels.GPUBuild {
		return "gpu"
	}
	return "cpu"
}

// fullVersion is what manifests record.
func fullVersion() string { return strings.TrimSuffix(version+"+"+commit, "+unknown") }
