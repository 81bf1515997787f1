package dbbench

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"harness-s/env/dbbench/embedded"
)

// infraTimeout bounds every call to a server that is not a policy's statement.
const infraTimeout = 30 * time.Second

// backend makes fresh databases: on an engine of their own, or on one server.
type backend interface {
	create(ctx context.Context, attempt string) (*database, error)
	version(ctx context.Context) (string, error)
	connections(ctx context.Context) (int, error) // how many the server takes, 0 = no limit
	close() error
}

// database is one attempt's database and the way to it. Connections of db start
// with the session settings; they are used once and then thrown away, because a
// policy's statements change session state.
type database struct {
	name string
	db   *sql.DB
	srv  *embedded.Server // nil on a real server
	drop func(ctx context.Context) error
}

type embeddedBackend struct{ listen string }

// embeddedName is the name of every embedded database: engines are private, so
// observations that show it are the same in every attempt.
const embeddedName = "dbbench"

func (b embeddedBackend) create(ctx context.Context, _ string) (*database, error) {
	srv, err := embedded.Start(embedded.Options{Listen: b.listen})
	if err != nil {
		return nil, err
	}
	db, err := srv.DB("")
	if err != nil {
		return nil, errors.Join(err, srv.Close())
	}
	d := &database{name: embeddedName, db: db, srv: srv}
	d.drop = func(context.Context) error { return errors.Join(db.Close(), srv.Close()) }
	if _, err := db.ExecContext(ctx, "CREATE DATABASE "+embeddedName+" CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_ai_ci"); err != nil {
		return nil, errors.Join(fmt.Errorf("create database: %w", err), d.drop(ctx))
	}
	return d, nil
}

func (embeddedBackend) version(context.Context) (string, error)  { return embedded.Version, nil }
func (embeddedBackend) connections(context.Context) (int, error) { return 0, nil }
func (embeddedBackend) close() error                             { return nil }

type realBackend struct {
	db        *sql.DB
	collation string
}

// newReal parses the DSN and opens a pool; nothing is dialled yet.
func newReal(dsn, collation string) (*realBackend, error) {
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		return nil, fmt.Errorf("parse dsn: %w (want user:password@tcp(127.0.0.1:3306)/)", err)
	}
	cfg.DBName, cfg.AllowAllFiles, cfg.MultiStatements, cfg.ParseTime = "", false, false, false
	cfg.InterpolateParams = true
	cfg.Logger = &mysql.NopLogger{}
	if cfg.Timeout == 0 {
		cfg.Timeout = 10 * time.Second
	}
	c, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, fmt.Errorf("configure connection: %w", err)
	}
	db := sql.OpenDB(embedded.Connector{Connector: c, Init: embedded.Init(collation)})
	db.SetMaxIdleConns(16)
	return &realBackend{db, collation}, nil
}

// databaseName derives the external name from the attempt id.
func databaseName(attempt string) string {
	sum := sha256.Sum256([]byte(attempt))
	return "hs_" + hex.EncodeToString(sum[:8])
}

func (b *realBackend) create(ctx context.Context, attempt string) (*database, error) {
	name := databaseName(attempt)
	create := "CREATE DATABASE " + name + " CHARACTER SET utf8mb4"
	if b.collation != "" {
		create += " COLLATE " + b.collation
	}
	for _, q := range []string{"DROP DATABASE IF EXISTS " + name, create} {
		if _, err := b.db.ExecContext(ctx, q); err != nil {
			return nil, fmt.Errorf("create database %s: %w", name, err)
		}
	}
	return &database{name: name, db: b.db, drop: func(ctx context.Context) error {
		if _, err := b.db.ExecContext(ctx, "DROP DATABASE IF EXISTS "+name); err != nil {
			return fmt.Errorf("drop database %s: %w", name, err)
		}
		return nil
	}}, nil
}

func (b *realBackend) version(ctx context.Context) (string, error) {
	var v string
	if err := b.db.QueryRowContext(ctx, "SELECT VERSION()").Scan(&v); err != nil {
		return "", fmt.Errorf("ask server version: %w", err)
	}
	return v, nil
}

func (b *realBackend) connections(ctx context.Context) (int, error) {
	var n int
	if err := b.db.QueryRowContext(ctx, "SELECT @@max_connections").Scan(&n); err != nil {
		return 0, fmt.Errorf("ask server for max_connections: %w", err)
	}
	return n, nil
}

func (b *realBackend) close() error { return b.db.Close() }

// reap drops databases that attempts of dead runs left behind: named hs_% with a
// table older than an hour.
func (b *realBackend) reap(ctx context.Context) error {
	rows, err := b.db.QueryContext(ctx, `SELECT table_schema FROM information_schema.tables WHERE table_schema LIKE 'hs\_%' `+
		`GROUP BY table_schema HAVING MAX(create_time) < NOW() - INTERVAL 1 HOUR`)
	if err != nil {
		return fmt.Errorf("list leftover databases: %w", err)
	}
	var names []string
	for rows.Next() {
		var n string
		if err := rows.Scan(&n); err != nil {
			rows.Close()
			return fmt.Errorf("list leftover databases: %w", err)
		}
		names = append(names, n)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return fmt.Errorf("list leftover databases: %w", err)
	}
	for _, n := range names {
		if _, err := b.db.ExecContext(ctx, "DROP DATABASE IF EXISTS "+ident(n)); err != nil {
			return fmt.Errorf("drop leftover database %s: %w", n, err)
		}
	}
	return nil
}

// session is one connection inside the attempt's database.
type session struct {
	conn *sql.Conn
	id   int64 // server-side connection id, for KILL QUERY
}

// dial opens a session outside any database.
func (d *database) dial(ctx context.Context) (*session, error) {
	conn, err := d.db.Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	s := &session{conn: conn}
	if err := conn.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&s.id); err != nil {
		s.close()
		return nil, fmt.Errorf("ask connection id: %w", err)
	}
	return s, nil
}

// connect opens a session inside the attempt's database.
func (d *database) connect(ctx context.Context) (*session, error) {
	s, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := s.conn.ExecContext(ctx, "USE "+d.name); err != nil {
		s.close()
		return nil, fmt.Errorf("enter database %s: %w", d.name, err)
	}
	return s, nil
}

// close really closes the connection: its session state must not reach anyone else.
func (s *session) close() {
	if s == nil {
		return
	}
	s.conn.Raw(func(any) error { return driver.ErrBadConn }) // makes the pool discard it
	s.conn.Close()
}

// kill ends the statement running on connection id, from another connection.
func (d *database) kill(id int64) error {
	ctx, cancel := context.WithTimeout(context.Background(), infraTimeout)
	defer cancel()
	if _, err := d.db.ExecContext(ctx, fmt.Sprintf("KILL QUERY %d", id)); err != nil {
		return fmt.Errorf("kill query: %w", err)
	}
	return nil
}

// load creates and fills the tables as the original does: every column TEXT, one
// INSERT with bound values.
func (s *session) load(ctx context.Context, tables []embedded.Table) error {
	for _, t := range tables {
		cols := make([]string, len(t.Columns))
		defs := make([]string, len(t.Columns))
		for i, c := range t.Columns {
			cols[i] = ident(c.Name)
			defs[i] = cols[i] + " TEXT"
		}
		if _, err := s.conn.ExecContext(ctx, "CREATE TABLE IF NOT EXISTS "+ident(t.Name)+" ("+strings.Join(defs, ",")+")"); err != nil {
			return fmt.Errorf("create table %q: %w", t.Name, err)
		}
		if len(t.Rows) == 0 {
			continue
		}
		tuple := "(" + strings.TrimSuffix(strings.Repeat("?,", len(cols)), ",") + ")"
		args := make([]any, 0, len(t.Rows)*len(cols))
		for _, row := range t.Rows {
			for _, c := range row {
				args = append(args, c)
			}
		}
		q := "INSERT INTO " + ident(t.Name) + " (" + strings.Join(cols, ",") + ") VALUES " +
			strings.TrimSuffix(strings.Repeat(tuple+",", len(t.Rows)), ",")
		if _, err := s.conn.ExecContext(ctx, q, args...); err != nil {
			return fmt.Errorf("fill table %q: %w", t.Name, err)
		}
	}
	return nil
}

// digests hashes every table. The error is the server's when a table or column
// is gone.
func (s *session) digests(ctx context.Context, tables []embedded.Table) ([]string, error) {
	out := make([]string, len(tables))
	for i, t := range tables {
		var h sql.NullString
		if err := s.conn.QueryRowContext(ctx, digestQuery(t)).Scan(&h); err != nil {
			return nil, fmt.Errorf("hash table %q: %w", t.Name, err)
		}
		if out[i] = h.String; !h.Valid {
			out[i] = "None" // no rows; what the original's text form shows
		}
	}
	return out, nil
}

// lost reports whether err means the connection, not the statement, failed.
func lost(err error) bool {
	var op net.Error
	var my *mysql.MySQLError
	switch {
	case err == nil:
		return false
	case errors.As(err, &my):
		return false
	case errors.Is(err, driver.ErrBadConn), errors.Is(err, mysql.ErrInvalidConn), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF),
		errors.Is(err, io.ErrClosedPipe), errors.Is(err, net.ErrClosed), errors.Is(err, sql.ErrConnDone), errors.As(err, &op):
		return true
	}
	return false
}

// serverFault reports the server errors that no statement of a policy explains:
// shutdown, too many connections, lost link (envs.md D2).
func serverFault(e *mysql.MySQLError) bool {
	switch e.Number {
	case 1040, 1053, 1077, 1079, 2002, 2003, 2006, 2013:
		return true
	}
	return false
}
