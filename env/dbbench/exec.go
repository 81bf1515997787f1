package dbbench

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"harness-s/env/dbbench/embedded"
)

// stopCause is why a running statement was killed.
type stopCause uint8

const (
	ranOn    stopCause = iota
	deadline           // the statement's own limit
	expired            // the episode's deadline
	cancelled
	outOfMemory
)

const (
	maxStatement  = 4 << 20 // bytes; longer SQL is refused like an oversized packet
	keepValues    = 64      // cells of the last SELECT kept for facts
	guardInterval = 50 * time.Millisecond
	killGrace     = 5 * time.Second
)

// outcome of running one statement on the server.
type execResult struct {
	cols     []string
	hasRows  bool
	text     string // repr of all rows, at least as long as the cap
	rows     int
	affected int64
	cells    []value // first keepValues cells
	null     bool    // single row of NULLs
	err      error
	stop     stopCause
}

// exec runs one statement under its limits. The statement is ended by KILL QUERY
// from another connection; dropping the client side would leave it running.
func (a *attempt) exec(ctx context.Context, query string) execResult {
	runCtx, abandon := context.WithCancel(context.WithoutCancel(ctx))
	defer abandon()
	res := make(chan execResult, 1)
	go func() { res <- a.query(runCtx, query) }()

	timer := time.NewTimer(a.stepTimeout)
	defer timer.Stop()
	var guard <-chan time.Time
	base := int64(0)
	if a.db.srv != nil && a.e.o.MemLimit > 0 {
		base = embedded.HeapBytes()
		tick := time.NewTicker(guardInterval)
		defer tick.Stop()
		guard = tick.C
	}
	stop := ranOn
	for stop == ranOn {
		select {
		case r := <-res:
			return r
		case <-timer.C:
			stop = deadline
		case <-ctx.Done():
			if stop = cancelled; errors.Is(ctx.Err(), context.DeadlineExceeded) {
				stop = expired
			}
		case <-guard:
			if embedded.HeapBytes()-base > a.e.o.MemLimit {
				stop = outOfMemory
			}
		}
	}
	killErr := a.db.kill(a.ses.id)
	grace := time.NewTimer(killGrace)
	defer grace.Stop()
	var r execResult
	select {
	case r = <-res:
	case <-grace.C: // the server ignores the kill: give up the connection
		abandon()
		r = <-res
	}
	if killErr != nil && lost(killErr) && r.err == nil {
		r.err = killErr
	}
	r.stop = stop
	return r
}

// query runs the statement on the session and renders what it returns.
func (a *attempt) query(ctx context.Context, query string) (r execResult) {
	switch statement(query) {
	case "INSERT", "UPDATE", "DELETE", "REPLACE":
		res, err := a.ses.conn.ExecContext(ctx, query)
		if err != nil {
			r.err = err
			return r
		}
		r.affected, _ = res.RowsAffected() // the driver always knows it
		r.text = "[]"
		return r
	}
	rows, err := a.ses.conn.QueryContext(ctx, query)
	if err != nil {
		r.err = err
		return r
	}
	defer rows.Close()
	r.err = a.render(&r, rows, query)
	return r
}

func (a *attempt) render(r *execResult, rows *sql.Rows, query string) error {
	types, err := rows.ColumnTypes()
	if err != nil {
		return err
	}
	dst := []byte{'['}
	var fix fixer
	if a.db.srv != nil {
		fix = newFixer(query, len(types))
	}
	raw := make([]any, len(types))
	ptr := make([]any, len(types))
	row := make([]value, len(types))
	for i, t := range types {
		ptr[i] = &raw[i]
		r.cols = append(r.cols, t.Name())
	}
	r.hasRows = len(types) > 0
	limit := 4*a.e.o.MaxChars + 16 // bytes that surely hold more than MaxChars code points
	for rows.Next() {
		r.rows++
		if len(dst) > limit && len(r.cells) >= keepValues {
			continue
		}
		if err := rows.Scan(ptr...); err != nil {
			return err
		}
		allNull := true
		for i, t := range types {
			row[i] = fix.apply(i, r.cols[i], cell(raw[i], t.DatabaseTypeName()))
			allNull = allNull && row[i] == nil
			if len(r.cells) < keepValues {
				r.cells = append(r.cells, row[i])
			}
		}
		r.null = r.rows == 1 && allNull
		if r.rows > 1 {
			dst = append(dst, ", "...)
		}
		dst = appendRow(dst, row)
	}
	r.text = string(append(dst, ']'))
	return rows.Err()
}

// failure turns an error of exec into what the policy sees, or into a fault of
// the infrastructure. The session is repaired on the way.
func (a *attempt) failure(ctx context.Context, query string, err error) (*mysql.MySQLError, error) {
	var my *mysql.MySQLError
	switch {
	case errors.Is(err, mysql.ErrPktTooLarge):
		return sqlError(1153, "08S01", "Got a packet bigger than 'max_allowed_packet' bytes"), nil
	case errors.As(err, &my):
		if a.db.srv != nil {
			my = a.e.trans.translate(my, query)
		}
		if serverFault(my) || my.Number == 1049 && !a.dropped && mentions(my.Message, a.db.name) {
			return nil, a.fault("step", my)
		}
		// The name on a real server differs from attempt to attempt; what the policy reads must not.
		shown := *my
		shown.Message = strings.ReplaceAll(my.Message, a.db.name, embeddedName)
		return &shown, nil
	case lost(err):
		if err := a.reconnect(ctx); err != nil {
			return nil, a.fault("step", err)
		}
		a.reconnects++
		return sqlError(2013, "HY000", "Lost connection to MySQL server during query"), nil
	}
	// Whatever the driver could not decode came from this statement.
	return sqlError(1105, "HY000", "%v", err), nil
}

// reconnect replaces a lost session on a living server.
func (a *attempt) reconnect(ctx context.Context) error {
	a.ses.close()
	a.ses = nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), infraTimeout)
	defer cancel()
	s, err := a.db.connect(ctx)
	if my := (*mysql.MySQLError)(nil); errors.As(err, &my) && my.Number == 1049 && a.dropped {
		s, err = a.db.dial(ctx)
	}
	if err != nil {
		return err
	}
	a.ses = s
	return nil
}
