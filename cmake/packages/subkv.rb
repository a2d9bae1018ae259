# A Homebrew formula that builds a checkout:
#
#   brew install --HEAD cmake/packages/subkv.rb
#
# A tap names a release's archive and its hash in place of `head`.
class Subkv < Formula
  include Language::Python::Virtualenv

  desc "Llama.cpp with a KV cache of calibrated, quantized coefficients"
  license "MIT"
  version "0.1.0"
  head File.expand_path("../..", __dir__), using: :git, branch: "main"

  depends_on "cmake" => :build
  depends_on "ninja" => :build
  depends_on "python@3.13"
  depends_on :linux

  # Python packages come as binaries of the package index, llama.cpp's source by its hash (runtime/llama.cpp/VERSION).
  def install
    venv = virtualenv_create(libexec, "python3.13", system_site_packages: false, without_pip: false)
    ENV["CMAKE_ARGS"] = "-DLLAMA_BUILD=OFF -DGGML_NATIVE=OFF -DSUBKV_PROGRAMS=ON -DSUBKV_PAGE=OFF"
    system venv.root/"bin/pip", "install", buildpath
    bin.install_symlink libexec/"bin/subkv"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/subkv --version")
    assert_match "kernel", shell_output("#{bin}/subkv doctor")
  end
end
