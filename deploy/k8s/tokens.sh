#!/bin/sh
# Makes a cluster's tokens, and prints the Secrets that hold what each side needs. Run it again to replace them all.
#
#     deploy/k8s/tokens.sh operator.token NAMESPACE... | kubectl apply -f -
#
# operator.token is yours alone and goes nowhere else. Each NAMESPACE is one of engines, and a tenant of its name; it gets
# the Secret cachesvc-engine. The daemon's namespace gets cachesvc-tokens (digests) and cachesvc-metrics (for Prometheus).
set -eu
umask 077

if [ $# -lt 2 ]; then
  echo "usage: $0 FILE NAMESPACE...   (FILE gets the operator's token)" >&2
  exit 2
fi
operator=$1
shift

newline='
'

fresh() {
  head -c 32 /dev/urandom | base64 | tr -d '\n'
}

entry() { # name, scope, token, tenant or nothing
  digest=$(printf %s "$3" | sha256sum | cut -d ' ' -f 1)
  printf '    [[token]]\n    name = "%s"\n    sha256 = "%s"\n    scopes = ["%s"]\n' "$1" "$digest" "$2"
  [ -z "$4" ] || printf '    tenant = "%s"\n' "$4"
}

secret() { # namespace, name
  printf -- '---\napiVersion: v1\nkind: Secret\nmetadata:\n  name: %s\n  namespace: %s\n' "$2" "$1"
  printf '  labels:\n    app.kubernetes.io/part-of: cachesvc\nstringData:\n'
}

token=$(fresh)
printf '%s\n' "$token" > "$operator"
entries=$(entry operator admin "$token" "")

token=$(fresh)
entries=$entries$newline$(entry prometheus metrics "$token" "")
secret cachesvc cachesvc-metrics
printf '  token: %s\n' "$token"

for namespace in "$@"; do
  token=$(fresh)
  entries=$entries$newline$(entry "engines of $namespace" engine "$token" "$namespace")
  secret "$namespace" cachesvc-engine
  printf '  token: %s\n' "$token"
done

secret cachesvc cachesvc-tokens
printf '  tokens.toml: |\n%s\n' "$entries"
