package chat

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Typed converts the string arguments of a parsed call by the JSON schema of the tool with its name: integer, number, boolean, null,
// object and array from their text, string as it is. It fails when the tool or a parameter is unknown, a required parameter is absent,
// or a text does not have its type; all problems are in one error whose text can be shown to a model. Arguments that are not strings
// stay as they are.
func (c Call) Typed(tools []Tool) (Call, error) {
	props, required, err := schema(c.Name, tools)
	if err != nil {
		return c, err
	}
	out := Call{Name: c.Name, Args: slices.Clone(c.Args)}
	var bad []string
	for i, a := range out.Args {
		if props == nil {
			break
		}
		p, ok := props.get(a.Key)
		if !ok {
			bad = append(bad, fmt.Sprintf("unknown parameter %q, want one of %q", a.Key, props.keys))
			continue
		}
		v, err := convert(a, types(p))
		if err != nil {
			bad = append(bad, err.Error())
			continue
		}
		out.Args[i].Value = v
	}
	for _, r := range required {
		if out.Arg(r) == nil {
			bad = append(bad, fmt.Sprintf("missing parameter %q", r))
		}
	}
	if len(bad) > 0 {
		return c, fmt.Errorf("call %q: %s", c.Name, strings.Join(bad, "; "))
	}
	return out, nil
}

// schema finds the properties and required names of a tool. props is nil when the tool declares none.
func schema(name string, tools []Tool) (props *value, required []string, err error) {
	var known []string
	for i, t := range tools {
		v, err := parseJSON(t.JSON)
		if err != nil {
			return nil, nil, fmt.Errorf("tool %d: %w", i, err)
		}
		f := &v
		if inner, ok := v.get("function"); ok {
			f = inner
		}
		n, ok := f.get("name")
		if !ok {
			continue
		}
		if n.text != name {
			known = append(known, n.text)
			continue
		}
		params, ok := f.get("parameters")
		if !ok {
			return nil, nil, nil
		}
		if r, ok := params.get("required"); ok {
			for _, e := range r.vals {
				required = append(required, e.text)
			}
		}
		if p, ok := params.get("properties"); ok && p.kind == jsonObject {
			props = p
		}
		return props, required, nil
	}
	return nil, nil, fmt.Errorf("unknown function %q, want one of %q", name, known)
}

// types returns the declared types of a property; empty means any.
func types(p *value) []string {
	t, ok := p.get("type")
	if !ok {
		return nil
	}
	if t.kind == jsonString {
		return []string{t.text}
	}
	var out []string
	for _, e := range t.vals {
		out = append(out, e.text)
	}
	return out
}

func convert(a Arg, want []string) (json.RawMessage, error) {
	v, err := parseJSON(a.Value)
	if err != nil {
		return nil, fmt.Errorf("parameter %q: %w", a.Key, err)
	}
	if v.kind != jsonString || len(want) == 0 {
		return a.Value, nil
	}
	text := trim(v.text)
	for _, w := range want {
		if w == "string" {
			continue
		}
		if raw, ok := typed(text, w); ok {
			return raw, nil
		}
	}
	if slices.Contains(want, "string") {
		return a.Value, nil
	}
	return nil, fmt.Errorf("parameter %q = %q is not of type %s", a.Key, clip(v.text), strings.Join(want, " or "))
}

// typed reads text as a JSON value of the given schema type; Python's True, False and None count as their JSON forms.
func typed(text, want string) (json.RawMessage, bool) {
	switch text {
	case "True", "False":
		text = strings.ToLower(text)
	case "None":
		text = "null"
	}
	v, err := parseJSON([]byte(text))
	if err != nil {
		return nil, false
	}
	ok := false
	switch want {
	case "integer":
		ok = v.kind == jsonNumber && !strings.ContainsAny(v.text, ".eE")
	case "number":
		ok = v.kind == jsonNumber
	case "boolean":
		ok = v.kind == jsonBool
	case "null":
		ok = v.kind == jsonNull
	case "array":
		ok = v.kind == jsonArray
	case "object":
		ok = v.kind == jsonObject
	}
	return json.RawMessage(text), ok
}
