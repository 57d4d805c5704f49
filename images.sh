#!/usr/bin/env bash
# Builds the images, for `make images`; docs/images.md says what the variables mean that it reads.
set -euo pipefail
cd "$(dirname "$0")"
all="operator dataloader trainer cli"

fail() {
  echo "images: $1" >&2
  exit 1
}

find_builder() {
  local name
  for name in buildah podman docker; do
    # `info` tells a docker without its engine from one that can build.
    if command -v "$name" > /dev/null && "$name" info > /dev/null 2>&1; then
      echo "$name"
      return
    fi
  done
  fail "neither buildah nor podman nor docker works here; install one of them, such as Debian's package buildah"
}

images=${IMAGES:-$all}
variant=${VARIANT:-cpu}
repository=${REPOSITORY:-megascale-omni}
tag=${TAG:-$(sed -n 's/^appVersion: *"\{0,1\}\([^" ]*\).*/\1/p' charts/megascale-omni/Chart.yaml)}
for image in $images; do
  [[ " $all " == *" $image "* ]] || fail "IMAGES: there is no image '$image'; name some of: $all"
done
[[ $variant == cpu || $variant == gpu ]] || fail "VARIANT: '$variant' is no variant of the trainer; use cpu or gpu"
if [ -n "${CA_BUNDLE:-}" ] && [ ! -r "$CA_BUNDLE" ]; then
  fail "CA_BUNDLE: '$CA_BUNDLE' cannot be read; name a file of certificates, or leave it out"
fi
builder=${BUILDER:-$(find_builder)}

build=("$builder" build)
[ "$builder" != buildah ] || build+=(--layers)
[ -z "${BASE:-}" ] || build+=(--build-arg "BASE=$BASE")
if [ -n "${CA_BUNDLE:-}" ]; then
  build+=(--secret "id=ca,src=$CA_BUNDLE" --build-arg SSL_CERT_FILE=/run/secrets/ca --build-arg PIP_CERT=/run/secrets/ca)
fi
[ -z "${NETRC:-}" ] || build+=(--secret "id=netrc,src=$NETRC")
for name in PIP_INDEX_URL UV_DEFAULT_INDEX; do
  [ -z "${!name:-}" ] || build+=(--build-arg "$name=${!name}")
done
for argument in ${BUILD_ARGS:-}; do
  build+=(--build-arg "$argument")
done
read -ra flags <<< "${BUILD_FLAGS:-}"
revision=$(git rev-parse HEAD 2> /dev/null || true)

for image in $images; do
  name=$repository/$image:$tag
  own=()
  if [ "$image" = trainer ]; then
    own=(--build-arg "VARIANT=$variant")
    [ "$variant" = cpu ] || name+=-$variant
  fi
  "${build[@]}" "${own[@]}" "${flags[@]}" --build-arg "VERSION=$tag" --build-arg "REVISION=$revision" \
    --file "$image/Containerfile" --tag "$name" .
  if [ -n "${ARCHIVE:-}" ]; then
    mkdir -p "$ARCHIVE"
    file=$ARCHIVE/$image.tar
    rm -f "$file"
    if [ "$builder" = docker ]; then
      docker save --output "$file" "$name"
    else
      case ${name%%/*} in
        *.* | *:* | localhost) reference=$name ;;
        *) reference=docker.io/$name ;; # where a node looks for a name without a host
      esac
      # zstd, as gzip takes minutes for torch.
      "$builder" push --quiet --compression-format zstd "$name" "oci-archive:$file:$reference"
    fi
  fi
  echo "images: built $name${ARCHIVE:+, saved to $file}"
done
