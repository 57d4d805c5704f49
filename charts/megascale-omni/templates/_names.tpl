{{/* Name of everything of this release: at most 50 characters, as suffixes follow. */}}
{{- define "omni.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Cluster-wide names also carry the namespace: two releases of one name may stand side by side. */}}
{{- define "omni.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "omni.name" .) -}}
{{- end -}}

{{- define "omni.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "omni.labels" -}}
{{ include "omni.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "omni.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "omni.name" .) -}}
{{- end -}}

{{/* The class that is created, else the one that is named, else nothing. */}}
{{- define "omni.priorityClass" -}}
{{- if .Values.priorityClass.create -}}
{{- .Values.priorityClass.name | default (include "omni.clusterName" .) -}}
{{- else -}}
{{- .Values.priorityClass.name -}}
{{- end -}}
{{- end -}}

{{- define "omni.subject" -}}
kind: ServiceAccount
name: {{ include "omni.serviceAccount" . }}
namespace: {{ .Release.Namespace }}
{{- end -}}
