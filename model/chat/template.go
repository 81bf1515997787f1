package chat

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
)

// Errors of templates that are not the published ones.
var (
	// ErrNoTemplate says that a checkpoint has no chat template.
	ErrNoTemplate = errors.New("no chat template in chat_template.jinja or tokenizer_config.json")
	// ErrTemplate says that a template cannot be used for rendering turn by turn with the tokens of Qwen3.5.
	ErrTemplate = errors.New("chat template cannot be used")
	// ErrEngine says that the Jinja engine would not write a value as Python's does.
	ErrEngine = errors.New("the Jinja engine cannot write this value as Python does")
)

// published are the SHA-256 digests of the published Qwen3.5 templates (model.md 5.5). They differ in the thinking default alone.
var published = map[string]Renderer{
	"a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715": {ThinkDefault: true, family: Large},
	"273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80": {ThinkDefault: false, family: Small},
}

// ForTemplate returns the renderer of a chat template. The published Qwen3.5 templates are known by their digest and rendered by this
// package's own code. Any other template is rendered by a Jinja engine when it passes some trials: turns must be built from Qwen3.5's
// tokens, end with <|im_end|> and show tool results; the error says what is wrong otherwise. special are special tokens by their name in
// tokenizer_config.json (bos_token, eos_token), which templates may use.
func ForTemplate(source string, special map[string]string) (Renderer, error) {
	source = strings.TrimSuffix(source, "\n") // Jinja drops one
	sum := sha256.Sum256([]byte(source))
	digest := hex.EncodeToString(sum[:])
	if r, ok := published[digest]; ok {
		return r, nil
	}
	r, err := newForeign(source, special)
	if err != nil {
		return Renderer{}, fmt.Errorf("load chat template %.12s: %w", digest, err)
	}
	r.family = Family(fmt.Sprintf("other template, sha256 %.12s", digest))
	return r, nil
}

// FromCheckpoint returns the renderer of a checkpoint folder: of chat_template.jinja, else of the template in tokenizer_config.json, of
// which the one named "default" counts when there are several. It fails with ErrNoTemplate when there is none.
func FromCheckpoint(dir fs.FS) (Renderer, error) {
	source, err := fs.ReadFile(dir, "chat_template.jinja")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Renderer{}, fmt.Errorf("load chat template: %w", err)
	}
	text, found := string(source), err == nil
	special := map[string]string{}
	raw, err := fs.ReadFile(dir, "tokenizer_config.json")
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return Renderer{}, fmt.Errorf("load chat template: %w", err)
	default:
		var c map[string]json.RawMessage
		if err := json.Unmarshal(raw, &c); err != nil {
			return Renderer{}, fmt.Errorf("load chat template: parse tokenizer_config.json: %w", err)
		}
		for _, name := range [...]string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"} {
			var plain *string
			var added struct{ Content *string }
			if json.Unmarshal(c[name], &plain) != nil || plain == nil {
				_ = json.Unmarshal(c[name], &added)
				plain = added.Content
			}
			if plain != nil {
				special[name] = *plain
			}
		}
		if !found {
			text, found = configTemplate(c["chat_template"])
		}
	}
	if !found {
		return Renderer{}, fmt.Errorf("load chat template: %w", ErrNoTemplate)
	}
	return ForTemplate(text, special)
}

// configTemplate reads chat_template of tokenizer_config.json: a string or a list of named templates.
func configTemplate(raw json.RawMessage) (string, bool) {
	var one *string
	if json.Unmarshal(raw, &one) == nil && one != nil {
		return *one, true
	}
	var many []struct{ Name, Template string }
	if json.Unmarshal(raw, &many) == nil {
		for _, t := range many {
			if t.Name == "default" {
				return t.Template, true
			}
		}
	}
	return "", false
}
