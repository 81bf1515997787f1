package env

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"harness-s/model/chat"
)

func TestOutcomes(t *testing.T) {
	for o, want := range map[Outcome]struct {
		class          Class
		valid, success bool
	}{
		Solved: {ClassSuccess, true, true}, Failed: {ClassPolicyFail, true, false}, NoSubmission: {ClassPolicyFail, true, false},
		StepLimit: {ClassPolicyFail, true, false}, ContextLimit: {ClassPolicyFail, true, false}, Timeout: {ClassTimeout, true, false},
		InfraVoid: {ClassInfra, false, false}, HarnessFault: {ClassHarnessFault, false, false}, TaskInvalid: {ClassInvalid, false, false},
		0: {ClassInfra, false, false}, 99: {ClassInfra, false, false}, // unknown never counts as a failure
	} {
		if o.Class() != want.class || o.Valid() != want.valid || o.Success() != want.success {
			t.Errorf("%v: class %v, valid %v, success %v", o, o.Class(), o.Valid(), o.Success())
		}
	}
	for o := Solved; o <= TaskInvalid; o++ {
		b, err := json.Marshal(o)
		var back Outcome
		if err2 := json.Unmarshal(b, &back); err != nil || err2 != nil || back != o || strings.Contains(o.String(), "unknown") {
			t.Errorf("%v round trip: %s, %v, %v", o, b, err, err2)
		}
	}
	var o Outcome
	if err := o.UnmarshalText([]byte("won")); err == nil {
		t.Error("unknown outcome accepted")
	}
	if ClassTimeout.String() != "timeout" || KindLimit.String() != "limit" || StepKind(77).String() != "unknown(77)" {
		t.Error("names")
	}
}

func TestInfraError(t *testing.T) {
	cause := errors.New("no route")
	err := fmt.Errorf("episode: %w", &InfraError{Phase: "open", Retryable: true, Err: cause})
	var ie *InfraError
	if !errors.Is(err, ErrInfra) || !errors.Is(err, cause) || !errors.As(err, &ie) || !ie.Retryable || !strings.Contains(err.Error(), "open: infrastructure fault: no route") {
		t.Error(err)
	}
}

type log struct {
	recs []UnsealRecord
	err  error
}

func (l *log) RecordUnseal(r UnsealRecord) error {
	l.recs = append(l.recs, r)
	return l.err
}

func TestUnseal(t *testing.T) {
	i := Info{Name: "dbbench", Backend: "embedded", DataDigest: "abc"}
	if err := (Unsealed{}).Check(i); !errors.Is(err, ErrSealed) {
		t.Errorf("zero value: %v", err)
	}
	l := &log{}
	u, err := Unseal("final evaluation", l, i)
	if err != nil || len(l.recs) != 1 {
		t.Fatal(err, l.recs)
	}
	want := UnsealRecord{ID: u.ID(), Reason: "final evaluation", Split: Test, Envs: []UnsealData{{"dbbench", "embedded", "abc"}}}
	if fmt.Sprint(l.recs[0]) != fmt.Sprint(want) || u.ID() == "" {
		t.Errorf("record %+v, want %+v", l.recs[0], want)
	}
	if err := u.Check(i); err != nil {
		t.Error(err)
	}
	changed := i
	changed.DataDigest = "def"
	if err := u.Check(changed); !errors.Is(err, ErrSealed) {
		t.Errorf("changed data: %v", err)
	}
	any, err := Unseal("whole run", l)
	if err != nil || any.Check(i) != nil {
		t.Error(err, any.Check(i))
	}
	l.err = errors.New("disk full")
	if u, err := Unseal("x", l, i); !errors.Is(err, l.err) || u.Check(i) == nil {
		t.Errorf("failed record still unseals: %v", err)
	}
	for _, err := range []error{second(Unseal("", l)), second(Unseal("x", nil))} {
		if err == nil {
			t.Error("accepted")
		}
	}
}

func second(_ Unsealed, err error) error { return err }

func TestToolsAndCalls(t *testing.T) {
	spec := ToolSpec{Name: "n", Description: "d"}
	if got := string(spec.Chat().JSON); got != `{"type":"function","function":{"name":"n","description":"d","parameters":{"type":"object","properties":{}}}}` {
		t.Error(got)
	}
	if got := string((ToolSpec{Parameters: json.RawMessage("{")}).Chat().JSON); got != "null" {
		t.Error(got)
	}
	a := CallAction(chat.Call{Name: "f", Args: []chat.Arg{{Key: "z", Value: json.RawMessage(`"1"`)}, {Key: "a\"", Value: json.RawMessage(`[1]`)}, {Key: "n"}}}, "raw")
	if a.Tool != "f" || a.Raw != "raw" || string(a.Args) != `{"z":"1","a\"":[1],"n":null}` {
		t.Errorf("%s", a.Args)
	}
}
